"""The scheduling pass of a decode server: admits prompts to the KV pool and resumes requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patches.engine_types import Req, Scheduler
from patches.scheduler.executor import Pass, drop_ended, has_nothing_to_plan
from patches.scheduler.kv_copy import has_adapter
from patches.scheduler.view import held, is_swapped, waiting
from sage_sched import scheduling_pass
from sage_sched.plan import UNLIMITED, Budget


def run_decode_pass(scheduler: Scheduler, original: Callable[[], None]) -> None:
    """Run Scheduler.process_decode_queue by the policy's plan."""
    if not scheduler.sage.plans():
        scheduler.sage.room.open_to_all()
        theirs = scheduler.server_args.num_reserved_decode_tokens
        scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens = theirs
        original()
        return
    if scheduler.sage.any_has_ended:
        drop_ended(scheduler, scheduler.running_batch)
    this = _DecodePass(scheduler, original)
    if has_nothing_to_plan(scheduler, scheduler.running_batch):
        this.admit([], UNLIMITED)
    else:
        scheduling_pass.run_pass(this)


class _DecodePass(Pass):
    """A pass without prefills. A request enters when the KV pool has room for its prompt, whose KV
    comes from a prefill server. A preempted request is backed up, and resumes as SGLang's retracted
    requests do."""

    def __init__(self, scheduler: Scheduler, original: Callable[[], None]) -> None:
        super().__init__(scheduler, lambda _: original(), scheduler.running_batch)
        self._prealloc: Any = scheduler.disagg_decode_prealloc_queue
        self.queue = waiting(scheduler)

    @property
    def runs_any(self) -> bool:
        return not self.running.is_empty() or bool(held(self._scheduler))

    def resume(self, requests: Sequence[Req]) -> list[Req]:
        assert self._preemption is not None
        scheduler = self._scheduler
        beside, fitting = [*self.running.reqs, *held(scheduler)], 0
        # SGLang does not check adapters here, because it admits nothing else meanwhile. Trap: too
        # many adapters end the scheduler.
        for req in requests:
            if not has_adapter(scheduler, req, [*beside, *requests[:fitting]]):
                break
            fitting += 1
        self._prealloc.retracted_queue = [*requests[:fitting]]
        with self._preemption.restoring() as back:
            back += self._prealloc.resume_retracted_reqs()
        scheduler.waiting_queue.extend(back)
        return [*self._prealloc.retracted_queue, *requests[fitting:]]

    def admit(self, visible: Sequence[Req], budget: Budget) -> None:
        room = self._state.room
        room.open_to(visible)
        self._prealloc.num_reserved_decode_tokens = self._state.core.headroom.num_steps
        # Requests that no plan has seen come last.
        places = {id(req): place for place, req in enumerate(self.queue)}
        self._prealloc.queue.sort(key=lambda entry: places.get(id(entry.req), len(places)))
        if self._preemption is not None:  # if it is off, SGLang resumes them first
            self._prealloc.retracted_queue = []
        try:
            self._original(self.running)
        finally:
            if self._preemption is not None:
                self._prealloc.retracted_queue = [req for req in self.queue if is_swapped(req)]
        if any(entry.req is room.refused for entry in self._prealloc.queue):
            self.is_full = self.runs_any

    def decode_only(self) -> None:
        self.admit([req for req in self.queue if not is_swapped(req)], UNLIMITED)


def order_arrived(scheduler: Scheduler) -> None:
    """Sort the requests whose KV has arrived, because there may be more of them than slots."""
    reqs = scheduler.waiting_queue
    if len(reqs) > 1:
        order = scheduler.sage.retention_order(reqs, range(len(reqs)))
        scheduler.waiting_queue = [reqs[position] for position in order]
