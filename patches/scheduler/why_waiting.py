"""Finds the reasons why requests wait."""

from __future__ import annotations

from patches.engine_types import Req, Scheduler
from patches.scheduler import view
from sage_sched.headroom import Headroom
from sage_sched.job import Job

REASONS = ("adapter", "slots", "memory", "long_prompt", "held")


def by_reason(scheduler: Scheduler) -> dict[str, list[Req]]:
    """Return the waiting requests by the first reason that applies: the adapter has no slot; all
    slots are taken; the KV has no room; a long prompt is being chunked; or the policy holds the
    request, for a common start or for requests that go first. A decode server has no cached
    prompts, and admits no prompt behind one for which it has no room."""
    batch, chunked = scheduler.running_batch, scheduler.chunked_req
    waiting = view.waiting(scheduler)
    running = {req.sage.job.adapter for req in (*batch.reqs, *((chunked,) if chunked else ()))}
    has_adapter = {
        name: name in running or view.fits_adapters(scheduler, {*running, name})
        for name in {req.sage.job.adapter for req in waiting}
    }
    has_slot, is_filled = view.free_slots(scheduler, batch) > 0, view.is_full(scheduler, batch)
    headroom: Headroom = scheduler.sage.core.headroom
    num_beside = len(batch.reqs) + len(view.held(scheduler))
    left_tokens = view.room_tokens(scheduler) - headroom.num_steps * num_beside
    decodes, refused = view.only_decodes(scheduler), scheduler.sage.room.refused
    is_filled |= decodes and any(req is refused for req in waiting)

    def needed_tokens(job: Job) -> int:
        return headroom.needed_tokens(job) - (0 if decodes else job.cached_tokens)

    found: dict[str, list[Req]] = {reason: [] for reason in REASONS}
    for req in waiting:
        job = req.sage.job
        if not has_adapter[job.adapter]:
            reason = "adapter"
        elif not has_slot:
            reason = "slots"
        elif is_filled or needed_tokens(job) > left_tokens:
            reason = "memory"
        else:
            reason = "long_prompt" if chunked is not None else "held"
        found[reason].append(req)
    return found
