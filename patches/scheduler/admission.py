"""SGLang's admission (PrefillAdder, managers/schedule_policy.py) reserves what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

from patches.engine_types import Req
from patches.scheduler.state import SchedulerState


def add(
    state: SchedulerState, original: Callable[..., Any], adder: Any, req: Req, *args: Any, **kw: Any
) -> Any:
    """PrefillAdder.add_one_req, or add_chunked_req for the next chunk of a prompt. They reserve by
    the cap: they see our headroom as the cap. Where no prefix is cached, SGLang has a
    reckoning of its own for answers that go on to it, which would not."""
    if state.settings.is_stock:
        return original(adder, req, *args, **kw)
    others = adder.can_run_list
    if others and (others[0].input_embeds is None) != (req.input_embeds is None):
        return AddReqResult.OTHER  # one prefill of both kinds of prompts ends SGLang's scheduler
    job = req.sage.job
    job.grow(len(req.output_ids))
    sampling = req.sampling_params
    cap_tokens = sampling.max_new_tokens
    asked_tokens = job.generated_tokens + state.headroom.left_tokens(job)
    sampling.max_new_tokens = min(cap_tokens, asked_tokens)
    ignores_eos, sampling.ignore_eos = sampling.ignore_eos, False
    try:
        return original(adder, req, *args, **kw)
    finally:
        sampling.max_new_tokens, sampling.ignore_eos = cap_tokens, ignores_eos


def correct(state: SchedulerState, adder: Any) -> None:
    """Replace what a new PrefillAdder has set aside for the running requests by our headroom."""
    if adder.running_batch is None or state.settings.is_stock:
        return
    reqs = adder.running_batch.reqs
    theirs = sum(adder._get_running_request_total_token_offset(req) for req in reqs)
    ours = sum(state.headroom.set_aside_tokens(state.jobs.running(reqs)))
    ours += state.headroom.kept_tokens
    adder.memory_budget.total_offset += ours - theirs
