"""Prompts and the lengths of their answers, out of datasets of the usual forms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predictor_store.data.files import DatasetError, RowError, raw_rows

# The names that are looked for, in this order.
PROMPT_FIELDS = ("prompt", "instruction", "question", "query", "problem", "input", "text")
CONVERSATION_FIELDS = ("conversations", "conversation", "messages")
OUTPUT_FIELDS = ("output", "response", "completion", "answer", "generation", "solution")
LENGTH_FIELDS = (
    "output_tokens", "output_len", "output_length", "num_output_tokens", "completion_tokens",
    "response_tokens",
)  # fmt: skip
# Alpaca: what an instruction is about stands in another field.
_CONTEXT_FIELDS = {"instruction": "input"}
_HUMAN = ("human", "user")
_MACHINE = ("gpt", "assistant", "chatgpt", "bot", "model")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Observation:
    """A prompt and how long its answer was, in tokens.

    output_tokens: 0 if only its text, output, is known. input_tokens: 0 if unknown. censored: the
    answer was cut off at output_tokens by its cap.
    """

    prompt: str
    output_tokens: int
    input_tokens: int = 0
    censored: bool = False
    output: str | None = None


@dataclass(slots=True)
class Reader:
    """Iterates over the usable rows of a dataset, see raw_rows, and counts the others.

    filters: the values, as text, that these fields must have. tokenizer: see raw_rows; with one, an
    answer's text is as good as a recorded length. malformed: (place, reason) of the first few of
    the num_malformed rows.
    """

    dataset: str
    filters: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Any = None
    num_read: int = 0
    num_filtered: int = 0
    num_malformed: int = 0
    malformed: list[tuple[str, str]] = field(default_factory=list)
    fields_seen: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[Observation]:
        """Raises DatasetError if the dataset cannot be read or has no usable row."""
        for place, raw in raw_rows(self.dataset, self.tokenizer):
            self.num_read += 1
            try:
                row = self._row(raw)
            except RowError as error:
                self.num_malformed += 1
                if len(self.malformed) < _MAX_NAMED:
                    self.malformed.append((place, str(error)))
                continue
            if row is None:
                self.num_filtered += 1
            else:
                yield row
        if self.num_read == self.num_filtered + self.num_malformed:
            raise DatasetError(self._nothing_usable())

    def _row(self, raw: Any) -> Observation | None:
        if isinstance(raw, RowError):
            raise raw
        if not isinstance(raw, dict):
            raise RowError(f"not an object but {raw!r:.60}")
        self.fields_seen.update(str(name) for name in raw)
        if any(_as_text(raw.get(name)) != value for name, value in self.filters.items()):
            return None
        prompt, output = _prompt_and_output(raw)
        length = _length(raw)
        if length is None and output is None:
            raise RowError(f"no output length: none of the fields {', '.join(LENGTH_FIELDS)}")
        if length is None and self.tokenizer is None:
            raise RowError("no output length recorded: give --tokenizer to count its output")
        cap = _whole(raw.get("cap"))
        is_cut = cap is not None and length is not None and length >= cap
        input_tokens = _whole(raw.get("prompt_tokens")) or 0
        return Observation(prompt, length or 0, input_tokens, is_cut, output)

    def _nothing_usable(self) -> str:
        seen = ", ".join(sorted(self.fields_seen)[:40]) or "none"
        filtered = f"; --filter left out {self.num_filtered} rows" if self.num_filtered else ""
        why = "".join(f"; {place}: {reason}" for place, reason in self.malformed[:1])
        return (
            f"{self.dataset} has no usable row (fields seen: {seen}{filtered}{why}). Call its "
            "fields prompt, and output or output_tokens"
        )


def _prompt_and_output(raw: dict[str, Any]) -> tuple[str, str | None]:
    name = _first_present(raw, CONVERSATION_FIELDS + PROMPT_FIELDS)
    if name is None:
        raise RowError(f"no prompt: none of the fields {', '.join(PROMPT_FIELDS)}")
    value = raw.get(name)
    answer = None
    if isinstance(value, list):
        prompt, answer = _first_exchange(value, name)
    elif isinstance(value, str) and value:
        prompt = value
        context = raw.get(_CONTEXT_FIELDS.get(name, ""))
        if isinstance(context, str) and context:
            prompt = f"{prompt}\n\n{context}"
    else:
        raise RowError(f"field {name} is {value!r:.60}, not a prompt")
    output = _output(raw, {name, _CONTEXT_FIELDS.get(name)})
    return prompt, answer if output is None else output


def _output(raw: dict[str, Any], taken: set[str | None]) -> str | None:
    name = _first_present(raw, [n for n in OUTPUT_FIELDS if n not in taken])
    if name is None:
        return None
    value = raw.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RowError(f"field {name} is {value!r:.60}, not a text")


def _first_exchange(turns: list[Any], name: str) -> tuple[str, str | None]:
    said = [_said(turn) for turn in turns]
    for i, (speaker, text) in enumerate(said):
        if speaker in _HUMAN and text:
            answered = i + 1 < len(said) and said[i + 1][0] in _MACHINE
            return text, said[i + 1][1] if answered else None
    raise RowError(f"field {name} has no turn of a human ({', '.join(_HUMAN)})")


def _said(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise RowError(f"a turn of the conversation is {turn!r:.60}")
    speaker = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        # OpenAI's parts; an image has no text.
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return str(speaker), content if isinstance(content, str) else ""


def _length(raw: dict[str, Any]) -> int | None:
    name = _first_present(raw, LENGTH_FIELDS)
    if name is None:
        return None
    length = _whole(raw[name])
    if not length:
        raise RowError(f"field {name} is {raw[name]!r:.60}, not a number of tokens")
    return length


def _whole(value: Any) -> int | None:
    """A number of tokens; None if it is none."""
    # A column with gaps comes out of Parquet as floats.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**31:
        return None
    if value != value // 1:
        return None
    return int(value)


def _first_present(raw: dict[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if raw.get(name) is not None), None)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
