"""One scheduling pass: the plan is carried out around SGLang's own pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan

from patches.compat import drop_ended, keeps_ended
from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.kv_copy import is_swapped
from patches.scheduler.preemption import Outcome
from sage_sched.plan import Budget, Plan


def run_pass(scheduler: Scheduler, original: Callable[[Batch], Any], running_batch: Batch) -> Any:
    """Scheduler.get_new_batch_prefill, by the policy's plan.

    SGLang's pass sees the requests that may enter now: never a swapped one, as it would prefill it.
    If it goes by its own order (sage_sched.switch), it sees all.
    """
    if not scheduler.sage.plans():
        return original(running_batch)
    if keeps_ended():
        drop_ended(running_batch)
    if scheduler.chunked_req is None and _has_nothing_to_plan(scheduler, running_batch):
        return _showing(scheduler, [], lambda: original(running_batch))
    plan = scheduler.sage.plan(running_batch)
    if plan.order is None:
        return _showing(scheduler, [], lambda: original(running_batch))
    queue = [scheduler.waiting_queue[position] for position in plan.order]
    if plan.decode_only:
        scheduler.waiting_queue = queue
        if scheduler.chunked_req is not None and _can_park(scheduler, running_batch):
            # SGLang's pass would prefill the next chunk.
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return _showing(scheduler, [], lambda: original(running_batch))
    with _within(scheduler, plan.budget, running_batch):
        return _carry_out(scheduler, plan, queue, original, running_batch)


def _has_nothing_to_plan(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether nobody waits, or nobody may enter until a request leaves, and memory does not run
    out. A plan would say so too; this spares the view of a long queue before every step."""
    state = scheduler.sage
    if state.preemption is not None and state.is_short(running_batch):
        return False
    if not scheduler.waiting_queue:
        return True
    return state.preemption is None and state.is_full(running_batch)


def _can_park(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether a prompt may wait between two chunks while others decode. It holds memory that they
    may need, and SGLang does not retract it; and a delayer of prefills expects to be asked in every
    pass, on all ranks."""
    return scheduler.prefill_delayer is None and running_batch.check_decode_mem()


def _carry_out(
    scheduler: Scheduler,
    plan: Plan,
    queue: list[Req],
    original: Callable[[Batch], Any],
    running_batch: Batch,
) -> Any:
    preemption = scheduler.sage.preemption
    was_full = scheduler.sage.is_full(running_batch)
    outcome = Outcome(running_batch, rest=queue)
    if preemption is not None:
        num_arrivals = scheduler.sage.jobs.num_arrivals
        outcome = preemption.carry_out(plan, num_arrivals, queue, running_batch)
    # A full batch takes in those to whom others yielded; for them the mark is lifted.
    lifts_mark = was_full and outcome.num_entering > 0
    if lifts_mark:
        outcome.running_batch.batch_is_full = False
    scheduler.waiting_queue = [*outcome.fresh, *outcome.rest, *outcome.yielded]
    num_open = plan.num_open + (0 if was_full and plan.is_new else outcome.num_left_out)
    visible = [*outcome.fresh, *_open(plan, outcome, num_open)]
    if not visible and outcome.running_batch.is_empty() and scheduler.chunked_req is None:
        # A swapped request has just found no room, and nobody is about to give any back: others
        # hold it, streaming sessions between turns say.
        visible = [req for req in outcome.rest if not is_swapped(req)]
    done = _showing(scheduler, visible, lambda: original(outcome.running_batch))
    if preemption is None or preemption.num_arrivals_planned < 0:
        return done
    if lifts_mark:
        left_out = any(req in scheduler.waiting_queue for req in outcome.fresh)
        done.running_batch.batch_is_full |= not left_out
    elif plan.is_new and not was_full and num_open > 0 and is_swapped(outcome.rest[0]):
        # It found no room. SGLang would have marked the batch so for a request that it sees;
        # without the mark a plan would be made before every step.
        done.running_batch.batch_is_full |= not done.running_batch.is_empty()
    return done


def _open(plan: Plan, outcome: Outcome, num_open: int) -> Iterable[Req]:
    """Who may enter after those of the plan's actions: of the first num_open nobody from behind a
    swapped request, whose turn it is before theirs."""
    may_enter = islice(outcome.rest, num_open)
    if plan.swapped_go_first:
        return takewhile(lambda req: not is_swapped(req), may_enter)
    return (req for req in may_enter if not is_swapped(req))


def _showing(scheduler: Scheduler, visible: Sequence[Req], call: Callable[[], Any]) -> Any:
    """Call something that sees these of the waiting requests alone. Those whose grammars get ready
    meanwhile, which SGLang puts behind them, wait for a plan that knows of them."""
    state, hidden = scheduler.sage, scheduler.waiting_queue
    if visible:
        shown = {id(req) for req in visible}
        hidden = [req for req in hidden if id(req) not in shown]
    scheduler.waiting_queue = list(visible)
    state.num_visible = len(visible)
    try:
        return call()
    finally:
        scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden, *state.unplanned]
        state.num_visible = None
        state.unplanned.clear()


def without_swapped(scheduler: Scheduler, call: Callable[[], Any]) -> Any:
    """Call something that looks at the queue and must not see swapped requests, as they are not
    waiting for a start. The queue stays as it is: a function that only one rank calls must not
    change it."""
    if scheduler.sage.preemption is None:
        return call()
    queue = scheduler.waiting_queue
    scheduler.waiting_queue = [req for req in queue if not is_swapped(req)]
    try:
        return call()
    finally:
        scheduler.waiting_queue = queue


@contextmanager
def _within(scheduler: Scheduler, budget: Budget, running_batch: Batch) -> Iterator[None]:
    """A pass that prefills no more than a budget says, in whole units of what this server can cut
    prompts into, at least one."""
    prefill_tokens, chunk_tokens = scheduler.max_prefill_tokens, scheduler.chunked_prefill_size
    unit_tokens = math.lcm(scheduler.page_size, scheduler.truncation_align_size or 1)
    scheduler.sage.chunk_limit_tokens = _units(budget.chunk_tokens, unit_tokens)
    limit_tokens = _units(budget.prefill_tokens, unit_tokens)
    if limit_tokens is not None:
        if scheduler.is_mixed_chunk:  # PrefillAdder takes a token off for each that decodes
            limit_tokens += len(running_batch.reqs)
        scheduler.max_prefill_tokens = min(prefill_tokens, limit_tokens)
        if chunk_tokens is not None:
            scheduler.chunked_prefill_size = min(chunk_tokens, limit_tokens)
    try:
        yield
    finally:
        scheduler.max_prefill_tokens, scheduler.chunked_prefill_size = prefill_tokens, chunk_tokens
        scheduler.sage.chunk_limit_tokens = None


def _units(num_tokens: int | None, unit_tokens: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // unit_tokens) * unit_tokens
