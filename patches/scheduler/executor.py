"""Runs a scheduling pass on SGLang: implements the engine of sage_sched.scheduling_pass, and shows
SGLang's own code a part of the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.scheduler import NextBatchPlan

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler import queues
from patches.scheduler.kv_copy import frees_memory, is_swapped, retract, retract_chunked, swapped
from patches.scheduler.preemption import Preemption
from patches.scheduler.stage import unit_tokens, without
from patches.scheduler.state import SchedulerState
from patches.scheduler.survival import why_not_retractable
from patches.scheduler.view import (
    is_full,
    is_short,
    num_arrivals,
    pass_tokens,
    room_tokens,
    step_tokens,
)
from sage_sched import scheduling_pass
from sage_sched.plan import Budget, Plan, Preempt

logger = logging.getLogger(__name__)


def run_pass(scheduler: Scheduler, original: Callable[[Batch], Any], running_batch: Batch) -> Any:
    """Run Scheduler.get_new_batch_prefill by the policy's plan. Under one of SGLang's own policies
    (sage_sched.app.switch) SGLang's pass sees all requests."""
    preemption: Preemption | None = scheduler.sage.last_preemption
    if preemption is not None:
        running_batch = preemption.join(running_batch)
    if not scheduler.sage.plans():
        return original(running_batch)
    queues.drop_ended(scheduler, running_batch)
    if has_nothing_to_plan(scheduler, running_batch):
        return scheduler.sage.stage.showing([], lambda: original(running_batch))
    this = Pass(scheduler, original, running_batch)
    scheduling_pass.run_pass(this)
    if preemption is not None and preemption.returning:
        # Where SGLang looks for requests to abort.
        scheduler.waiting_queue = [*scheduler.waiting_queue, *preemption.returning]
    return this.done


class Pass:
    """A pass of SGLang's scheduler. done: the return value of SGLang's own part."""

    def __init__(
        self, scheduler: Scheduler, original: Callable[[Batch], Any], running: Batch
    ) -> None:
        """running: the running batch, which changes during the pass."""
        self.running = running
        self.done: Any = None
        self._scheduler, self._original = scheduler, original
        self._state: SchedulerState = scheduler.sage
        self.core = self._state.core
        self._preemption: Preemption | None = self._state.preemption

    @property
    def queue(self) -> list[Req]:
        return self._scheduler.waiting_queue

    @queue.setter
    def queue(self, queue: list[Req]) -> None:
        self._scheduler.waiting_queue = queue

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
        if self._preemption is not None:
            self._preemption.carried_out(plan, self.queue, entering, left, preempted)

    def admit(self, visible: Sequence[Req], budget: Budget) -> None:
        retracted = self._retract_for_chunk(budget) if self.is_chunking else []
        if self._scheduler.enable_lora and self._any_returns:
            # SGLang does not see the adapters of requests that are about to join.
            visible = []
            self.core.plan_again()
        with self._state.stage.within(budget, self.running):
            self.done = self._state.stage.showing(visible, lambda: self._original(self.running))
        self.running = self.done.running_batch
        if retracted:
            self.queue = [*self.queue, *retracted]

    def decode_only(self) -> None:
        if not self.is_chunking:
            self.done = self._state.stage.showing([], lambda: self._original(self.running))
        elif _can_park(self._scheduler, self.running):
            # SGLang's pass would prefill the next chunk.
            self.done = NextBatchPlan(batch_to_run=None, running_batch=self.running)
        else:
            self.admit([], Budget(prefill_tokens=0))

    def _retract_for_chunk(self, budget: Budget) -> list[Req]:
        """Retract requests until the next chunk has room, and return those that wait again.

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
    if not queues.waiting(scheduler):
        state.waiting.look(())  # drop old references, which would keep requests alive
        return True
    if not is_full(scheduler, running_batch):
        return False
    return state.preemption is None or not state.core.may_have_changed(
        num_arrivals(scheduler),
        (len(req.output_ids) for req in (*running_batch.reqs, *queues.held(scheduler))),
        state.reserve_tokens,
    )


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
        left_tokens, pass_tokens(scheduler, running_batch), unit_tokens(scheduler)
    )
    return step_tokens(scheduler, running_batch) + chunk_tokens <= room_tokens(scheduler)


def timed_out(scheduler: Scheduler, poll: Callable[[], list[Any]]) -> list[Any]:
    """Return the aborts for SGLang's timeouts, and note their reasons.

    A preempted request neither waits for its start nor runs, so its time off the device counts as
    neither. Only one rank calls this; its result is broadcast.
    """
    preempted: list[Req] = []
    if envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0:  # scanning a long queue takes a while
        preempted = [req for req in scheduler.waiting_queue if req.sage.is_preempted]
    aborts: list[Any] = without(scheduler, preempted, poll)
    if not aborts:
        return []
    # SGLang's running timeout counts from the start of a request.
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch is not None]
    running = {req.rid: req for batch in batches for req in batch.reqs}
    limit_s = envs.SGLANG_REQ_RUNNING_TIMEOUT.get()
    reqs = {req.rid: req for req in scheduler.waiting_queue} | running
    found = []
    for abort in aborts:
        if abort.rid not in running or running[abort.rid].sage.waits.ran_s() > limit_s:
            reqs[abort.rid].sage.refusal = abort.abort_message
            found.append(abort)
    return found


def without_started(scheduler: Scheduler, call: Callable[[], Any]) -> Any:
    """Call a function that counts queued requests, and hide the requests that do not count.

    Swapped-out requests do not count. Nor does the first request on an idle server: SGLang would
    start it before the next arrives, but ours may wait for its prediction and arrive together with
    the next.
    """
    hidden = swapped(scheduler.waiting_queue)
    if not hidden and scheduler.is_fully_idle(ignore_waiting=True):
        hidden = scheduler.waiting_queue[:1]
    return without(scheduler, hidden, call)
