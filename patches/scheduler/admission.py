"""Makes SGLang's admission (PrefillAdder, managers/schedule_policy.py) reserve the plan's
headroom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from patches.engine_types import Req
from patches.scheduler.state import SchedulerState


def add(
    state: SchedulerState, original: Callable[..., Any], adder: Any, req: Req, *args: Any, **kw: Any
) -> Any:
    """Run PrefillAdder.add_one_req, or add_chunked_req for the next chunk of a prompt.

    SGLang reserves KV by the cap of an answer, so it is shown our headroom as the cap. It must also
    see ignore_eos as False: otherwise, without a prefix cache, it would reserve by another
    calculation, which ignores the cap. It reserves at most CLIP_MAX_NEW_TOKENS for an answer, so
    the rest is taken from its budget.
    """
    if state.is_stock:
        return original(adder, req, *args, **kw)
    others = adder.can_run_list
    if others and (others[0].input_embeds is None) != (req.input_embeds is None):
        return AddReqResult.OTHER  # trap: both kinds of prompts in one prefill end the scheduler
    job = req.sage.job
    job.grow(len(req.output_ids))
    sampling = req.sampling_params
    cap_tokens = sampling.max_new_tokens
    left_tokens = state.core.headroom.left_tokens(job)
    beyond_tokens = max(0, left_tokens - CLIP_MAX_NEW_TOKENS)
    adder.memory_budget.total_offset += beyond_tokens
    sampling.max_new_tokens = min(cap_tokens, job.generated_tokens + left_tokens)
    ignores_eos, sampling.ignore_eos = sampling.ignore_eos, False
    try:
        return original(adder, req, *args, **kw)
    finally:
        sampling.max_new_tokens, sampling.ignore_eos = cap_tokens, ignores_eos
        if req not in others:
            adder.memory_budget.total_offset -= beyond_tokens


def correct(state: SchedulerState, adder: Any) -> None:
    """Replace a new PrefillAdder's reserve for the running requests by our headroom."""
    if adder.running_batch is None or state.is_stock:
        return
    reqs = adder.running_batch.reqs
    theirs = sum(adder._get_running_request_total_token_offset(req) for req in reqs)
    ours = sum(state.core.headroom.set_aside_tokens(state.jobs.running(reqs)))
    ours += state.core.headroom.kept_tokens
    adder.memory_budget.total_offset += ours - theirs
