"""Runs a scheduling pass on SGLang: implements the engine of sage_sched.scheduling_pass, and shows
SGLang's own code a part of the queue and of the plan's budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.srt.managers.scheduler import NextBatchPlan
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.kv_copy import frees_memory, retract, retract_chunked
from patches.scheduler.preemption import Preemption
from patches.scheduler.state import SchedulerState
from patches.scheduler.survival import why_not_retractable
from patches.scheduler.view import (
    held,
    is_full,
    is_lifted,
    is_short,
    is_swapped,
    num_arrivals,
    pass_tokens,
    room_tokens,
    step_tokens,
    waiting,
)
from sage_sched import scheduling_pass
from sage_sched.plan import Budget, Plan, Preempt

logger = logging.getLogger(__name__)


def run_pass(scheduler: Scheduler, original: Callable[[Batch], Any], running_batch: Batch) -> Any:
    """Run Scheduler.get_new_batch_prefill by the policy's plan. Under one of SGLang's own policies
    (sage_sched.app.switch) SGLang's pass sees all requests."""
    state: SchedulerState = scheduler.sage
    preemption: Preemption | None = state.last_preemption
    if preemption is not None and preemption.returning:
        running_batch = preemption.join(running_batch)
    if not state.plans():
        return original(running_batch)
    if state.any_has_ended:
        drop_ended(scheduler, running_batch)
    this = state.this_pass = Pass(scheduler, original, running_batch)
    try:
        if has_nothing_to_plan(scheduler, running_batch):
            this.show([])
        else:
            scheduling_pass.run_pass(this)
    finally:
        state.this_pass = None
    scheduler.waiting_queue = this.queue
    if preemption is not None and preemption.returning:
        # Where SGLang looks for requests to abort.
        scheduler.waiting_queue = [*this.queue, *preemption.returning]
    return this.done


class Pass:
    """A pass of SGLang's scheduler. While it runs, it is SchedulerState.this_pass.

    queue: SGLang's queue, which gets this order as soon as SGLang's part begins.
    done: the return value of SGLang's part.
    chunk_limit_tokens: the largest chunk of a prompt; None: no limit.
    """

    def __init__(
        self, scheduler: Scheduler, original: Callable[[Batch], Any], running: Batch
    ) -> None:
        """running: the running batch, which changes during the pass."""
        self.running = running
        self.done: Any = None
        self.queue = scheduler.waiting_queue
        self.chunk_limit_tokens: int | None = None
        self._scheduler, self._original = scheduler, original
        self._state: SchedulerState = scheduler.sage
        self.core = self._state.core
        self._preemption: Preemption | None = self._state.preemption
        self._num_visible: int | None = None
        self._unplanned: list[Req] = []

    @property
    def is_full(self) -> bool:
        return is_full(self._scheduler, self.running)

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        self.running.batch_is_full = is_full

    @property
    def runs_any(self) -> bool:
        return self._any_returns or not self.running.is_empty()

    @property
    def _any_returns(self) -> bool:
        return self._preemption is not None and bool(self._preemption.returning)

    @property
    def is_chunking(self) -> bool:
        return self._scheduler.chunked_req is not None

    is_swapped = staticmethod(is_swapped)

    def plan(self) -> Plan:
        return self._state.plan(self.running)

    def preempt(self, actions: Sequence[Preempt]) -> list[Req]:
        assert self._preemption is not None
        return self._preemption.preempt(self.running, actions)

    def resume(self, requests: Sequence[Req]) -> list[Req]:
        assert self._preemption is not None
        return self._preemption.resume(self.running, requests)

    def carried_out(
        self, plan: Plan, entering: list[Req], left: list[Req], preempted: list[Req]
    ) -> None:
        if self._preemption is None:
            return
        self._preemption.counts["num_without_host_room"] += plan.num_without_host_room
        if (trace := self._state.trace) is not None:
            done = plan.actions[: len(entering) + len(preempted)]
            trace.carried_out(done, [*self.queue[: len(plan.actions)], *preempted], left)
        _agree(*([req.rid for req in reqs] for reqs in (entering, left, preempted)))

    def admit(self, visible: Sequence[Req], budget: Budget) -> None:
        retracted = self._retract_for_chunk(budget) if self.is_chunking else []
        if self._scheduler.enable_lora and self._any_returns:
            # SGLang does not see the adapters of requests that are about to join.
            visible = []
            self.core.plan_again()
        with self._within(budget):
            self.show(visible)
        self.running = self.done.running_batch
        if retracted:
            self.queue = [*self.queue, *retracted]

    def decode_only(self) -> None:
        if not self.is_chunking:
            self.show([])
        elif _can_park(self._scheduler, self.running):
            # SGLang's pass would prefill the next chunk.
            self.done = NextBatchPlan(batch_to_run=None, running_batch=self.running)
        else:
            self.admit([], Budget(prefill_tokens=0))

    def show(self, visible: Sequence[Req]) -> None:
        """Let SGLang make its part of the pass. It sees only these waiting requests. Requests that
        it appends meanwhile, because their grammars are ready, wait for the next plan."""
        scheduler, hidden = self._scheduler, self.queue
        if visible:
            shown = {id(req) for req in visible}
            end = hidden.index(visible[-1]) + 1
            hidden = [*(req for req in hidden[:end] if id(req) not in shown), *hidden[end:]]
        scheduler.waiting_queue = list(visible)
        self._num_visible = len(visible)
        try:
            self.done = self._original(self.running)
        finally:
            self.queue = [*scheduler.waiting_queue, *hidden, *self._unplanned]
            scheduler.waiting_queue = self.queue
            self._num_visible = None
            self._unplanned.clear()

    def hide_unplanned(self, visible: list[Req]) -> None:
        """Remove requests that joined the queue after the plan, before SGLang walks through it."""
        if self._num_visible is not None:
            self._unplanned += visible[self._num_visible :]
            del visible[self._num_visible :]

    @contextmanager
    def _within(self, budget: Budget) -> Iterator[None]:
        """Limit SGLang's prefills to the budget within this context. The limit is rounded down to
        units at which this server can cut prompts, but is at least one unit."""
        scheduler = self._scheduler
        prefill_tokens, chunk_tokens = scheduler.max_prefill_tokens, scheduler.chunked_prefill_size
        unit = _unit_tokens(scheduler)
        self.chunk_limit_tokens = _units(budget.chunk_tokens, unit)
        limit_tokens = _units(budget.prefill_tokens, unit)
        if limit_tokens is not None:
            if scheduler.is_mixed_chunk:  # PrefillAdder subtracts a token per decoding request
                limit_tokens += len(self.running.reqs)
            scheduler.max_prefill_tokens = min(prefill_tokens, limit_tokens)
            if chunk_tokens is not None:
                scheduler.chunked_prefill_size = min(chunk_tokens, limit_tokens)
        try:
            yield
        finally:
            scheduler.max_prefill_tokens = prefill_tokens
            scheduler.chunked_prefill_size = chunk_tokens
            self.chunk_limit_tokens = None

    def _retract_for_chunk(self, budget: Budget) -> list[Req]:
        """Retract requests until the next chunk has room. Return the requests that wait again.

        If the chunk still has no room, the chunked prompt is retracted too. This can happen because
        streaming sessions keep their KV when they are retracted.
        """
        scheduler, running = self._scheduler, self.running
        if _has_room_for_chunk(scheduler, running, budget):
            return []
        default = running._get_decode_retraction_order(running.reqs)
        order = [req for req in map(running.reqs.__getitem__, default) if frees_memory(req)]
        gone: list[Req] = []
        may_preempt = scheduler.server_args.disaggregation_mode == "null"
        while order and not _has_room_for_chunk(scheduler, running, budget):
            if may_preempt and why_not_retractable(order[-1]) is not None:
                break  # the prompt has not answered yet
            gone.append(order.pop())
            retract(running, gone[-1])
        if may_preempt and not _has_room_for_chunk(scheduler, running, budget):
            gone.append(retract_chunked(scheduler))
        self.is_full = False
        logger.warning("the next chunk of a prompt has no room: %d requests retracted", len(gone))
        return gone


def has_nothing_to_plan(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether a plan would change nothing: memory suffices, no prompt is being chunked, and no
    request waits or can enter before another ends. This saves the facts of a plan, which take ten
    times as long (patches/scheduler/view.py), before every step."""
    state = scheduler.sage
    if scheduler.chunked_req is not None:
        return False
    if state.preemption is not None and is_short(scheduler, running_batch):
        return False
    if not waiting(scheduler):
        state.jobs.follow([])  # drop old references, which would keep requests alive
        return True
    if not is_full(scheduler, running_batch):
        if is_lifted(scheduler, running_batch):
            return False
        if not state.core.first_lacks_memory(num_arrivals(scheduler), room_tokens(scheduler)):
            return False
    if state.preemption is not None and state.core.may_have_changed(
        num_arrivals(scheduler),
        (len(req.output_ids) for req in (*running_batch.reqs, *held(scheduler))),
        state.reserve_tokens,
    ):
        return False
    running_batch.batch_is_full = True
    return True


def drop_ended(scheduler: Scheduler, running_batch: Batch) -> None:
    """Remove the requests that have ended since the last pass from the running batch. They hold no
    KV to free, and a policy that has just taken over does not know them. SGLang removes them before
    a prefill pass (since 0.5.23), but only after the pass of a decode server."""
    scheduler.sage.any_has_ended = False
    num_reqs = len(running_batch.reqs)
    running_batch.filter_batch()
    if len(running_batch.reqs) < num_reqs:
        running_batch.batch_is_full = False


def _can_park(scheduler: Scheduler, running_batch: Batch) -> bool:
    """Whether a prompt may wait between two chunks while others decode.

    It may not wait if they need its memory, because SGLang does not retract a chunked prompt. It
    may not wait either if a prefill delayer is used, which all ranks have to call in every pass.
    """
    return scheduler.prefill_delayer is None and running_batch.check_decode_mem()


def _has_room_for_chunk(scheduler: Scheduler, running_batch: Batch, budget: Budget) -> bool:
    """Whether the KV pool has room for the next chunk and a decode step."""
    if scheduler.is_hybrid_swa:  # with hybrid attention SGLang lets a chunk wait
        return running_batch.is_empty() or bool(running_batch.check_decode_mem())
    chunked = scheduler.chunked_req
    assert chunked is not None
    left_tokens = len(chunked.origin_input_ids) + len(chunked.output_ids) - chunked.prefix_len
    chunk_tokens = budget.next_chunk_tokens(
        left_tokens, pass_tokens(scheduler, running_batch), _unit_tokens(scheduler)
    )
    return step_tokens(scheduler, running_batch) + chunk_tokens <= room_tokens(scheduler)


def _unit_tokens(scheduler: Scheduler) -> int:
    """Return the unit at which this server can cut prompts, in tokens."""
    return math.lcm(scheduler.page_size, scheduler.truncation_align_size or 1)


def _units(num_tokens: int | None, unit: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // unit) * unit


@rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
def _agree(entering: list[str], left: list[str], preempted: list[str]) -> None:
    """Pass the outcome of a plan, by request id, to SGLang's check that ranks agree
    (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER).

    left: requests that were to enter but found no room.
    """
