"""Finds prompts, answers and token counts in chats, completions and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from predictor_store.logs.fields import Row, parsed, value_at, whole

CHATS = (
    "messages",
    "conversations",
    "conversation",
    "items",
    "dialogue",
    "dialog",
    "turns",
    "chat",
)
_HUMAN = {"human", "user", "prompter", "question", "instruction"}
_MACHINE = {"gpt", "assistant", "chatgpt", "bot", "model", "ai", "bing", "bard", "answer", "output"}
_ROLES = ("role", "from", "speaker", "author", "sender")
_CONTENTS = ("content", "value", "text", "message", "parts", "utterance")
_CUT = {"length", "max_tokens", "max_output_tokens", "MAX_TOKENS", "abort", "model_length"}
INPUT_TOKENS = (
    "prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "prompt_token_count",
    "promptTokenCount", "input_token_count", "inputTokenCount", "input",
)  # fmt: skip
OUTPUT_TOKENS = (
    "completion_tokens", "output_tokens", "completionTokens", "outputTokens",
    "candidates_token_count", "candidatesTokenCount", "output_token_count", "outputTokenCount",
    "output",
)  # fmt: skip
CAPS = (
    "max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "maxTokens",
    "max_tokens_to_sample",
)  # fmt: skip


def text_of(content: Any) -> str | None:
    """Return the text of a message; None if it has none, such as a tool call or a picture."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        named = next((content[name] for name in _CONTENTS if content.get(name) is not None), None)
        return None if named is content else text_of(named)
    if isinstance(content, Sequence):
        texts = [text for part in content if (text := text_of(part)) is not None]
        return "\n".join(texts) if texts else None
    return None


def is_turn(value: Any) -> bool:
    """Whether a value may be a turn of a conversation, or a pair of turns."""
    if isinstance(value, Mapping):
        names = {str(name).lower() for name in value}
        return not names.isdisjoint((*_ROLES, *_HUMAN)) and not names.isdisjoint(
            (*_CONTENTS, *_MACHINE)
        )
    return isinstance(value, str)


def said(turn: Any, number: int) -> tuple[str, str | None]:
    """Return the speaker of a turn ("user", "assistant" or another name), and the text."""
    if isinstance(turn, str):  # UltraChat: speakers alternate
        return ("user", "assistant")[number % 2], turn
    if not isinstance(turn, Mapping):
        return "", None
    role = value_at(turn, next((name for name in _ROLES if name in turn), ""))
    if isinstance(role, Mapping):
        role = role.get("role")
    name = str(role or "").lower()
    name = "user" if name in _HUMAN else "assistant" if name in _MACHINE else name
    content = next((turn[key] for key in _CONTENTS if turn.get(key) is not None), None)
    return name, text_of(content)


def turns_of(chat: Any) -> list[tuple[str, str | None]]:
    """Return speaker and text of each turn. A pair of question and answer is two turns."""
    found = list[tuple[str, str | None]]()
    for number, turn in enumerate(chat if isinstance(chat, list) else []):
        if isinstance(turn, Mapping) and not any(name in turn for name in _ROLES):
            asked = next((turn[name] for name in turn if name.lower() in _HUMAN), None)
            answered = next((turn[name] for name in turn if name.lower() in _MACHINE), None)
            found += [("user", text_of(asked)), ("assistant", text_of(answered))]
        else:
            found.append(said(turn, number))
    return found


def first_exchange(chat: Any) -> tuple[str, str | None]:
    """Return the first question of a human, and the answer to it; ("", None) if there is none."""
    turns = turns_of(chat)
    for number, (speaker, text) in enumerate(turns):
        if speaker == "user" and text:
            is_answered = number + 1 < len(turns) and turns[number + 1][0] == "assistant"
            return text, turns[number + 1][1] if is_answered else None
    return "", None


def last_exchange(chat: Any) -> tuple[str, str | None]:
    """Return the last question of a human, and the answer if there is one. A server predicts the
    last answer from this question."""
    turns = turns_of(chat)
    answer = turns.pop()[1] if turns and turns[-1][0] == "assistant" else None
    asked = next((text for speaker, text in reversed(turns) if speaker == "user" and text), "")
    return asked, answer


def prompt_of(value: Any) -> str:
    """Return the prompt of a request, or the last question in its messages; "" without one."""
    value = parsed(value)
    if isinstance(value, Mapping):
        for name in (*CHATS, "prompt", "input", "contents", "text", "body", "json"):
            if value.get(name) is not None:
                return prompt_of(value[name])
        return text_of(value) or ""
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return value[0]
        return last_exchange(value)[0]
    return value if isinstance(value, str) else ""


def answer_of(value: Any) -> str | None:
    """Return the text of an answer; None if it has none, such as a tool call."""
    value = parsed(value)
    if isinstance(value, Mapping):
        for path in ("choices.0.message", "choices.0.text", "output_text", "response", "output"):
            if (inner := value_at(value, path)) is not None:
                return answer_of(inner)
    if isinstance(value, list):
        value = [part for part in value if not _is_thought(part)]
    return text_of(value)


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "reasoning"


def usage_tokens(usage: Any) -> tuple[int | None, int | None]:
    """Return input and output tokens, including cached and reasoning tokens. Raises RowError."""
    usage = parsed(usage)
    if not isinstance(usage, Mapping):
        return None, None
    found = []
    for names, parts in ((INPUT_TOKENS, _INPUT_PARTS), (OUTPUT_TOKENS, _OUTPUT_PARTS)):
        name = next((name for name in names if usage.get(name) is not None), None)
        tokens = None if name is None else whole(usage[name], name)
        if tokens is not None:
            tokens += sum(
                whole(usage[part], part) for part in parts.get(name, ()) if usage.get(part)
            )
        found.append(tokens)
    if "output" in usage and "prompt_tokens" not in usage:
        return _langfuse_tokens(usage, *found)
    return found[0], _with_reasoning(usage, *found)


def _with_reasoning(
    usage: Mapping[str, Any], num_in: int | None, num_out: int | None
) -> int | None:
    """Add reasoning tokens if the total shows that they are counted separately, as xAI's are."""
    total = usage.get("total_tokens")
    names = ("completion_tokens_details.reasoning_tokens", "reasoning_tokens")
    reasoning = next((n for name in names if (n := value_at(usage, name))), None)
    if num_in is None or num_out is None or total is None or reasoning is None:
        return num_out
    more = whole(reasoning, "reasoning_tokens")
    return num_out + more if whole(total, "total_tokens") == num_in + num_out + more else num_out


# Anthropic and Gemini count these in addition to the other input tokens; OpenAI includes them
# there.
_INPUT_PARTS: dict[str | None, tuple[str, ...]] = {
    "input_tokens": ("cache_read_input_tokens", "cache_creation_input_tokens"),
}
_OUTPUT_PARTS: dict[str | None, tuple[str, ...]] = {
    "candidatesTokenCount": ("thoughtsTokenCount",),
    "candidates_token_count": ("thoughts_token_count",),
}


def _langfuse_tokens(
    usage: Mapping[str, Any], num_in: int | None, num_out: int | None
) -> tuple[int | None, int | None]:
    """Return input and output tokens. The buckets are separate, unless the total shows that they
    are not."""
    total, base = usage.get("total"), (num_in or 0) + (num_out or 0)
    if total is not None and whole(total, "total") == base:
        return num_in, num_out
    more = {
        side: sum(
            whole(value, name)
            for name, value in usage.items()
            if name.startswith(f"{side}_") and value is not None
        )
        for side in ("input", "output")
    }
    return (
        None if num_in is None else num_in + more["input"],
        None if num_out is None else num_out + more["output"],
    )


def num_answers(response: Any) -> int:
    """Return the number of a response's answers. The usage counts the tokens of all of them."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    return max(1, len(choices)) if isinstance(choices, list) else 1


def was_cut(reason: Any) -> bool:
    """Whether a finish reason says that the answer was cut off."""
    if isinstance(reason, list):
        return any(map(was_cut, reason))
    if isinstance(reason, Mapping):
        reason = reason.get("type") or reason.get("reason")
    return isinstance(reason, str) and reason.removeprefix("FinishReason.") in _CUT


def cap_of(row: Row, *places: str) -> int | None:
    """Return the cap of a request's answer, from any of these objects; None if there is none."""
    paths = [f"{place}.{name}" if place else name for place in places for name in CAPS]
    return row.cap(*paths)
