"""Limits what SGLang's own code sees in a pass: a part of the queue, and the plan's budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from patches.engine_types import Batch, Req, Scheduler
from sage_sched.plan import Budget


class Stage:
    """Controls which part of one scheduler's queue SGLang's code sees during a pass.

    chunk_limit_tokens: the largest chunk; None outside a pass, or if the plan has no limit.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_visible: int | None = None
        self._unplanned: list[Req] = []
        self.chunk_limit_tokens: int | None = None

    def showing(self, visible: Sequence[Req], call: Callable[[], Any]) -> Any:
        """Call a function that sees only these of the waiting requests. Requests that SGLang
        appends meanwhile, because their grammars are ready, wait for the next plan."""
        scheduler = self._scheduler
        hidden = scheduler.waiting_queue
        if visible:
            shown = {id(req) for req in visible}
            end = hidden.index(visible[-1]) + 1
            hidden = [*(req for req in hidden[:end] if id(req) not in shown), *hidden[end:]]
        scheduler.waiting_queue = list(visible)
        self._num_visible = len(visible)
        try:
            return call()
        finally:
            scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden, *self._unplanned]
            self._num_visible = None
            self._unplanned.clear()

    def hide_unplanned(self, visible: list[Req]) -> None:
        """Remove requests that joined the queue after the plan, before SGLang walks through it."""
        if self._num_visible is not None:
            self._unplanned += visible[self._num_visible :]
            del visible[self._num_visible :]

    @contextmanager
    def within(self, budget: Budget, running_batch: Batch) -> Iterator[None]:
        """Limit SGLang's prefills to the budget within this context. The limit is rounded down to
        units at which this server can cut prompts, but is at least one unit."""
        scheduler = self._scheduler
        prefill_tokens, chunk_tokens = scheduler.max_prefill_tokens, scheduler.chunked_prefill_size
        unit = unit_tokens(scheduler)
        self.chunk_limit_tokens = _units(budget.chunk_tokens, unit)
        limit_tokens = _units(budget.prefill_tokens, unit)
        if limit_tokens is not None:
            if scheduler.is_mixed_chunk:  # PrefillAdder subtracts a token per decoding request
                limit_tokens += len(running_batch.reqs)
            scheduler.max_prefill_tokens = min(prefill_tokens, limit_tokens)
            if chunk_tokens is not None:
                scheduler.chunked_prefill_size = min(chunk_tokens, limit_tokens)
        try:
            yield
        finally:
            scheduler.max_prefill_tokens = prefill_tokens
            scheduler.chunked_prefill_size = chunk_tokens
            self.chunk_limit_tokens = None


def unit_tokens(scheduler: Scheduler) -> int:
    """Return the unit at which this server can cut prompts, in tokens."""
    return math.lcm(scheduler.page_size, scheduler.truncation_align_size or 1)


def _units(num_tokens: int | None, unit: int) -> int | None:
    return None if num_tokens is None else max(1, num_tokens // unit) * unit


def without(scheduler: Scheduler, hidden: Sequence[Req], call: Callable[[], Any]) -> Any:
    """Call a function that does not see these of the waiting requests."""
    if not hidden:
        return call()
    unseen, queue = {id(req) for req in hidden}, scheduler.waiting_queue
    scheduler.waiting_queue = visible = [req for req in queue if id(req) not in unseen]
    num_visible = len(visible)
    try:
        return call()
    finally:
        if len(visible) < num_visible:  # a full queue drops one for a higher priority
            kept = unseen | {id(req) for req in visible}
            queue = [req for req in queue if id(req) in kept]
        scheduler.waiting_queue = queue
