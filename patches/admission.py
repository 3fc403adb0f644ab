"""SGLang's PrefillAdder counts on what is foreseen (managers/schedule_policy.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.engine_types import Req
from patches.scheduler_state import SchedulerState


def add_one(
    state: SchedulerState,
    original: Callable[..., Any],
    adder: Any,
    req: Req,
    *args: Any,
    **kw: Any,
) -> Any:
    """PrefillAdder.add_one_req, which reads what to ask for off the cap."""
    job = req.sage.job
    job.grow(len(req.output_ids))
    sampling = req.sampling_params
    cap_tokens = sampling.max_new_tokens
    sampling.max_new_tokens = min(cap_tokens, state.admission.asked_tokens(job))
    try:
        return original(adder, req, *args, **kw)
    finally:
        sampling.max_new_tokens = cap_tokens


def correct(state: SchedulerState, adder: Any) -> None:
    """Replace what a new PrefillAdder has set aside for the running requests. Those of a prefill
    that is parked between two layers have answers to come too, and SGLang does not see them."""
    if adder.running_batch is None:
        return
    reqs, parked = adder.running_batch.reqs, [] if state.slices is None else state.slices.parked
    if state.admission.quantile <= 0:
        offsets = map(adder._get_running_request_total_token_offset, parked)
        adder.memory_budget.total_offset += sum(offsets)
        return
    theirs = sum(adder._get_running_request_total_token_offset(req) for req in reqs)
    jobs = state.jobs.running([*reqs, *parked])
    ours = sum(state.admission.set_aside_tokens(jobs, adder.new_token_ratio, adder.page_size))
    adder.memory_budget.total_offset += ours - theirs
