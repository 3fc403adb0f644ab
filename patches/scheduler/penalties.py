"""Restores SGLang's counts of a request's tokens (penalties, min_new_tokens)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from patches.engine_types import Req


@dataclass(slots=True, weakref_slot=True)
class _One:
    """A batch of one request, as SGLang's penalizers read it."""

    reqs: list[Req]
    device: Any


def count_again(sampling: Any, batch: Any) -> None:
    """Count the tokens of begun answers again.

    Each prefill, and each return of a swapped-out request, begins with empty counts
    (SamplingBatchInfo.from_schedule_batch). So a request that was retracted or preempted would
    count from zero.
    """
    counts = sampling.penalizer_orchestrator
    if not counts.is_required or not any(req.output_ids for req in batch.reqs):
        return
    # Penalizers hold their batch and their orchestrator weakly, so both stay in these lists.
    ones = [_One([req], batch.device) for req in batch.reqs]
    kinds = {*counts.penalizers}
    first, *others = found = [type(counts)(counts.vocab_size, one, kinds) for one in ones]
    for each, req in zip(found, batch.reqs, strict=True):
        if each.is_required:
            for token in torch.tensor(_counted(req, batch), device=batch.device).unsqueeze(1):
                each.cumulate_output_tokens(token)
    for other, one in zip(others, ones[1:], strict=True):
        first.merge(other)
        ones[0].reqs += one.reqs  # a penalizer that is needed only later is set up for all of them
    first.batch = batch
    sampling.penalizer_orchestrator = first


def _counted(req: Req, batch: Any) -> list[int]:
    """Return the tokens that SGLang would have counted by now if the request had gone on.

    A decode step counts the newest token first. With overlap SGLang is one token behind, and begins
    with the last token of the prompt (ScheduleBatch.cumulate_penalty_output_tokens). So the counts
    of a request that comes back from host memory are exact only without overlap.
    """
    if not req.output_ids:
        return []
    if batch.forward_mode.is_prebuilt():
        return [*req.output_ids[:-1]]
    if batch.enable_overlap:
        return [req.origin_input_ids[-1], *req.output_ids[:-1]]
    return [*req.output_ids]
