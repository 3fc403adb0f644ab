"""Reports answers to the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import BatchStrOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from patches.http.asked import eos_ids_of, own_stop_ids
from patches.http.incoming import incoming
from predictor_store.service.client import PredictorClient


def learn(manager: TokenizerManager, client: PredictorClient, output: BatchStrOutput) -> None:
    """Report ended answers, and long answers that are still running, to the history."""
    for i, (rid, reason) in enumerate(zip(output.rids, output.finished_reasons, strict=True)):
        found = manager.rid_to_state.get(rid)
        if found is None or (kept := incoming(found.obj)).handle is None:
            continue
        input_tokens, output_tokens = output.prompt_tokens[i], output.completion_tokens[i]
        if reason is None:
            if output_tokens >= kept.tell_at_tokens:
                # Rare: one message each time the length doubles.
                kept.tell_at_tokens = 2 * output_tokens
                client.goes_on(kept.handle, input_tokens, output_tokens)
        # An answer without tokens only filled the prefix cache for the samples of n > 1.
        elif output_tokens > 0 and reason["type"] in ("stop", "length", "abort"):
            is_cut, stopped = reason["type"] != "stop", was_stopped(manager, found.obj, reason)
            client.finished(kept.handle, input_tokens, output_tokens, is_cut, stopped)


def was_stopped(
    manager: TokenizerManager, obj: GenerateReqInput, reason: Mapping[str, Any]
) -> bool:
    """Whether an answer with this finish_reason ended at the client's stop, not at the model's own
    end."""
    if reason["type"] != "stop":
        return False
    matched = reason.get("matched")
    return isinstance(matched, str) or matched in own_stop_ids(obj, eos_ids_of(manager))
