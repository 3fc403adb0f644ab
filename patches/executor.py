"""One scheduling pass: the plan is carried out around SGLang's own pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan

from patches.engine_types import Batch, Req, Scheduler
from patches.kv_copy import is_swapped
from patches.preemption import Outcome
from sage_sched.plan import Budget, Plan


def run_pass(scheduler: Scheduler, original: Callable[[Batch], Any], running_batch: Batch) -> Any:
    """Scheduler.get_new_batch_prefill, by the policy's plan.

    SGLang's pass sees the requests that may enter now: never a swapped one, as it would prefill it.
    """
    if not scheduler.waiting_queue and scheduler.chunked_req is None:
        return original(running_batch)
    plan = scheduler.sage.plan(running_batch)
    if plan.order is None:
        return _showing(scheduler, [], lambda: original(running_batch))
    queue = [scheduler.waiting_queue[position] for position in plan.order]
    if plan.decode_only:
        scheduler.waiting_queue = queue
        if scheduler.chunked_req is None:
            return _showing(scheduler, [], lambda: original(running_batch))
        # SGLang's pass would prefill the next chunk.
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    with _within(scheduler, plan.budget):
        return _carry_out(scheduler, plan, queue, original, running_batch)


def _carry_out(
    scheduler: Scheduler,
    plan: Plan,
    queue: list[Req],
    original: Callable[[Batch], Any],
    running_batch: Batch,
) -> Any:
    preemption = scheduler.sage.preemption
    was_full = running_batch.batch_is_full and not running_batch.is_empty()
    outcome = Outcome(running_batch, rest=queue)
    if preemption is not None:
        num_arrivals = scheduler.sage.jobs.num_arrivals
        outcome = preemption.carry_out(plan, num_arrivals, queue, running_batch)
    # A full batch takes in those to whom others yielded; for them the mark is lifted.
    lifts_mark = was_full and outcome.num_entering > 0
    if lifts_mark:
        outcome.running_batch.batch_is_full = False
    scheduler.waiting_queue = [*outcome.fresh, *outcome.rest, *outcome.yielded]
    visible = [*outcome.fresh, *_open(plan, outcome)]
    done = _showing(scheduler, visible, lambda: original(outcome.running_batch))
    if preemption is None or preemption.num_arrivals_planned < 0:
        return done
    if lifts_mark:
        left_out = any(req in scheduler.waiting_queue for req in outcome.fresh)
        done.running_batch.batch_is_full |= not left_out
    elif plan.is_new and not was_full and outcome.rest and is_swapped(outcome.rest[0]):
        # It found no room. SGLang would have marked the batch so for a request that it sees;
        # without the mark a plan would be made before every step.
        done.running_batch.batch_is_full |= not done.running_batch.is_empty()
    return done


def _open(plan: Plan, outcome: Outcome) -> Iterable[Req]:
    """Who may enter after those of the plan's actions: nobody from behind a swapped request, whose
    turn it is before theirs. If nobody runs, all may. The swapped one has just found no room then,
    and nobody is about to give any back: others hold it, streaming sessions between turns say."""
    may_enter = islice(outcome.rest, plan.num_open)
    nobody_runs = not outcome.fresh and outcome.running_batch.is_empty()
    if plan.swapped_go_first and not nobody_runs:
        return takewhile(lambda req: not is_swapped(req), may_enter)
    return (req for req in may_enter if not is_swapped(req))


def _showing(scheduler: Scheduler, visible: Sequence[Req], call: Callable[[], Any]) -> Any:
    """Call something that sees these of the waiting requests alone."""
    hidden = scheduler.waiting_queue
    if visible:
        shown = {id(req) for req in visible}
        hidden = [req for req in hidden if id(req) not in shown]
    scheduler.waiting_queue = list(visible)
    try:
        return call()
    finally:
        scheduler.waiting_queue = scheduler.waiting_queue + hidden


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
def _within(scheduler: Scheduler, budget: Budget) -> Iterator[None]:
    """A pass that prefills no more than a budget says, in whole pages, at least one."""
    prefill_tokens, chunk_tokens = scheduler.max_prefill_tokens, scheduler.chunked_prefill_size
    page_size = scheduler.page_size
    scheduler.sage.chunk_limit_tokens = _pages(budget.chunk_tokens, page_size)
    limit_tokens = _pages(budget.prefill_tokens, page_size)
    if limit_tokens is not None:
        scheduler.max_prefill_tokens = min(prefill_tokens, limit_tokens)
        if chunk_tokens is not None:
            scheduler.chunked_prefill_size = min(chunk_tokens, limit_tokens)
    try:
        yield
    finally:
        scheduler.max_prefill_tokens, scheduler.chunked_prefill_size = prefill_tokens, chunk_tokens
        scheduler.sage.chunk_limit_tokens = None


def _pages(num_tokens: int | None, page_size: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // page_size) * page_size
