"""What SGLang writes down of a request and its answer, in its log or its dumps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a record may raise that is not as SGLang writes it.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has its answer.

    arrival_s: on the server's clock. cap_tokens: its max_new_tokens; 0 if it has none, None if that
    is not known. is_cut: whether its answer was ended by something else than itself. prompt: its
    text, "" if it is not known. ids: of its prompt, () if they are not known, or not all. ttlt_s:
    the time to its last token.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cap_tokens: int | None
    is_cut: bool
    ttlt_s: float
    prompt: str = ""
    ids: Sequence[int] = ()


def cap_of(asked: Mapping[str, Any]) -> int | None:
    """max_new_tokens of a request's sampling_params, as SGLang has it
    (sglang/srt/sampling/sampling_params.py): 128 if nobody names it, none if it is null."""
    sampling = asked.get("sampling_params")
    if not isinstance(sampling, Mapping):
        return None
    cap = sampling.get("max_new_tokens", 128)
    return 0 if cap is None else int(cap)


def is_cut(meta: Mapping[str, Any]) -> bool:
    """Whether something else than its own end ended an answer."""
    reason = meta.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type", "stop") != "stop"
