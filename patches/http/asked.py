"""Reads signs of an answer's length from a request, apart from the prompt's words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from patches.compat import thinking_of
from predictor_store.predict.asked import NOTHING_ASKED, OWN, SHAPED, Asked, Scope, digest

_EFFORTS = {"minimal": -1, "low": -1, "high": 1, "xhigh": 1, "ultra": 1, "max": 1}
_THINKING_ARGUMENTS = ("enable_thinking", "thinking")
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
# _STOPS end an answer, but its words are the model's own. _SHAPES change its words, so its length
# says nothing about answers without them. A cap has a field of its own.
_STOPS = ("stop", "stop_token_ids", "stop_regex")
_SHAPES = (*_CONSTRAINTS, "logit_bias", "ignore_eos", "min_new_tokens")
_CHARS_PER_TOKEN = 4
_MAX_COUNT = 2**31 - 1


def asked_of_chat(request: Any) -> Asked:
    """Read a ChatCompletionRequest (entrypoints/openai/protocol.py), checked by pydantic."""
    tools, choice, effort = request.tools or (), request.tool_choice, request.reasoning_effort
    instructions = _texts(request.messages, ("system", "developer"))
    system = digest(*instructions)
    opening = _texts(request.messages, ("user",))[:1]
    return Asked(
        thinks=_thinks(request.chat_template_kwargs or {}, thinking_of(request), effort),
        effort=_effort(effort),
        num_tools=0 if choice == "none" else len(tools),
        tool_choice={"auto": 0, "none": -1}.get(str(choice), 1) if tools else 0,
        is_constrained=request.response_format is not None
        and getattr(request.response_format, "type", None) != "text",
        num_turns=len(request.messages),
        system=system if instructions else "",
        # A conversation that continues sends its beginning again.
        session=digest(system, *opening) if opening else "",
    )


def asked_of(obj: GenerateReqInput, of_chat: Asked | None, tenant: str = "") -> Asked:
    """Read a GenerateReqInput, whose sampling parameters are not validated yet.

    tenant: "" unless its source is trusted. Sessions of different tenants are different, even if
        their clients use one name. Sessions of different scopes are different too, because a limit
        on one answer says nothing about the length of another.
    """
    sampling = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    asked = of_chat or NOTHING_ASKED
    session = _session(obj) or asked.session
    stops, cap = sampling.get("stop"), sampling.get("max_new_tokens")
    return replace(
        asked,
        input_tokens=_input_tokens(obj),
        max_tokens=min(max(cap, 0), _MAX_COUNT) if type(cap) is int else 0,
        num_stops=1 if isinstance(stops, str) else len(stops) if isinstance(stops, list) else 0,
        is_constrained=asked.is_constrained
        or any(sampling.get(name) is not None for name in _CONSTRAINTS),
        session=session and digest(tenant, scope_of(obj).name, session),
    )


def scope_of(obj: GenerateReqInput, eos_ids: Collection[int] = ()) -> Scope:
    """Return the scope of a request's answer, which says for which requests its length is evidence.
    The sampling parameters are not validated yet.

    eos_ids: tokens that end every answer.
    """
    named = getattr(obj, "lora_path", None)
    adapter = named if isinstance(named, str) else ""
    sampling = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    shapes = {name: sampling[name] for name in _SHAPES if sampling.get(name)}
    if shapes.get("min_new_tokens") == 1:
        del shapes["min_new_tokens"]
    for name in ("custom_logit_processor", "max_thinking_tokens"):
        if given := getattr(obj, name, None):
            shapes[name] = given
    stops = {name: sampling[name] for name in _STOPS if sampling.get(name)}
    stops["stop_token_ids"] = sorted(own_stop_ids(obj, eos_ids))
    if not shapes and not any(stops.values()):
        return Scope(adapter)
    try:
        limits = digest(repr(sorted(shapes.items())), repr(sorted(stops.items())))
    except RecursionError:  # SGLang refuses such deep nesting
        return Scope(adapter)
    return Scope(adapter, limits, SHAPED if shapes else OWN)


def eos_ids_of(manager: TokenizerManager) -> set[int]:
    """Return the tokens that end every answer of this model."""
    of_config = getattr(manager.model_config, "hf_eos_token_id", None) or ()
    of_tokenizer = getattr(manager.tokenizer, "eos_token_id", None)
    return {*of_config} if of_tokenizer is None else {*of_config, of_tokenizer}


def own_stop_ids(obj: GenerateReqInput, eos_ids: Collection[int]) -> set[int]:
    """Return the tokens that end this answer, but not every answer."""
    sampling = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    given = sampling.get("stop_token_ids")
    ids = given if isinstance(given, list) else ()
    return {token for token in ids if type(token) is int} - set(eos_ids)


def _session(obj: GenerateReqInput) -> str:
    """Return a digest of the session that the client names; "" if none."""
    params = obj.session_params
    named = params.get("id") if isinstance(params, dict) else None
    for name in (named, obj.session_id, obj.conversation_id):
        if isinstance(name, str) and name:
            return digest(name)
    return ""


def _input_tokens(obj: GenerateReqInput) -> int:
    """Estimate the tokens of the whole prompt, which is not tokenized yet."""
    if isinstance(obj.input_ids, list):
        return len(obj.input_ids)
    return len(obj.text) // _CHARS_PER_TOKEN if isinstance(obj.text, str) else 0


def _thinks(arguments: Mapping[str, Any], thinking: object, effort: object) -> int:
    for name in _THINKING_ARGUMENTS:
        if isinstance(arguments.get(name), bool):
            return 1 if arguments[name] else -1
    if isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive", "disabled"):
        return -1 if thinking["type"] == "disabled" else 1
    return -1 if effort == "none" else 0


def _effort(effort: object) -> int:
    if isinstance(effort, float):
        return 1 if effort >= 0.7 else -1 if effort < 0.3 else 0
    return _EFFORTS.get(str(effort), 0)


def _texts(messages: Sequence[Any], roles: tuple[str, ...]) -> list[str]:
    return [text_of(m) for m in messages if getattr(m, "role", None) in roles]


def text_of(message: Any) -> str:
    """Return the text of a chat message, without its images."""
    content = getattr(message, "content", None)
    if isinstance(content, str):
        return content
    texts = (getattr(part, "text", None) for part in content or [])
    return "\n".join(text for text in texts if isinstance(text, str))
