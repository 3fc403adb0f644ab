"""Where a client's lies end: requests that are refused (status 400) as they come in.

Refused are requests whose words for us cannot be read, and those that would kill a scheduler of
SGLang, and with it all that it serves. Reserved keys are dropped (patches.carrier.strip).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def custom_params_of(obj: GenerateReqInput) -> Mapping[str, Any] | None:
    """A client's custom_params. Raises ValueError unless they are an object, or None."""
    sampling = obj.sampling_params
    given = sampling.get("custom_params") if isinstance(sampling, dict) else None
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"custom_params is {given!r:.80}, allowed: an object")
    return given


def check_token_ids(manager: TokenizerManager, obj: GenerateReqInput) -> None:
    """Raises ValueError if a prompt has token ids beyond the model's vocabulary: looking them up
    would end the scheduler. Those of a prompt with media are checked once it is known whether they
    are read (check_tokenized)."""
    _check(obj.input_ids, manager, has_media=reads_media(manager, obj))


def reads_media(manager: TokenizerManager, obj: GenerateReqInput) -> bool:
    """Whether it may have ids that stand for media. A model of text ignores what it is sent."""
    return manager.mm_processor is not None and bool(obj.contains_mm_input())


def _check(ids: Any, manager: TokenizerManager, *, has_media: bool) -> None:
    try:
        least, most = min(ids), max(ids)
        is_below, is_above = least < 0, most >= manager.model_config.vocab_size
    except (TypeError, ValueError):
        return  # there are none, or SGLang will say what is wrong with them
    if is_below or (is_above and not has_media):
        wrong, last = least if is_below else most, manager.model_config.vocab_size - 1
        raise ValueError(f"input_ids have {wrong!r:.40}, allowed: 0 to {last}")


def check_tokenized(
    manager: TokenizerManager, obj: GenerateReqInput, tokenized: TokenizedGenerateReqInput
) -> None:
    """Raises ValueError for an empty prompt, for media that were not read, as SGLang then looks up
    all ids, and for beam search, whose slots SGLang miscounts."""
    ids = tokenized.input_ids
    if reads_media(manager, obj) and tokenized.mm_inputs is None:
        _check(ids, manager, has_media=False)
    if ids is not None and not len(ids) and tokenized.mm_inputs is None:
        raise ValueError("the prompt is empty: it has no tokens")
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        raise ValueError(
            "beam_width above 1: beam search is not served here, as it can end the server where "
            "its slots are full"
        )
