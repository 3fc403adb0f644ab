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
    would end the scheduler. LoRA adapters may add ids, and multimodal prompts use ids of their
    own."""
    try:
        least, most = min(obj.input_ids), max(obj.input_ids)
        is_below, is_above = least < 0, most >= manager.model_config.vocab_size
    except (TypeError, ValueError):
        return  # there are none, or SGLang will say what is wrong with them
    if is_below or (is_above and not obj.lora_path and not obj.contains_mm_input()):
        wrong, last = least if is_below else most, manager.model_config.vocab_size - 1
        raise ValueError(f"input_ids have {wrong!r:.40}, allowed: 0 to {last}")


def check_tokenized(tokenized: TokenizedGenerateReqInput) -> None:
    """Raises ValueError for an empty prompt, and for beam search, whose slots SGLang miscounts."""
    ids = tokenized.input_ids
    if ids is not None and not len(ids) and tokenized.mm_inputs is None:
        raise ValueError("the prompt is empty: it has no tokens")
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        raise ValueError(
            "beam_width above 1: beam search is not served here, as it can end the server where "
            "its slots are full"
        )
