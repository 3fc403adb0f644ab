"""Admits the requests of one pass by memory, as SGLang does.

It follows _get_new_batch_prefill_raw (managers/scheduler.py) and PrefillAdder
(managers/schedule_policy.py). Under our policies sage_sched.headroom sets the memory to keep free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulator.pool import Cached
from bench.simulator.request import Progress
from bench.simulator.state import EngineState
from bench.simulator.stock import StockPolicy
from sage_sched.headroom import Headroom
from sage_sched.plan import Budget


@dataclass(frozen=True, slots=True)
class Part:
    """The new tokens of one request in a prefill step, after its cached or prefilled ones."""

    progress: Progress
    cached_tokens: int
    new_tokens: int
    completes: bool


@dataclass(slots=True)
class PassResult:
    """The result of a pass.

    parts: the parts of the prefill step. plans: whether it made a plan. num_moves, moved_tokens:
    the requests and the tokens swapped out and in.
    """

    parts: list[Part] = field(default_factory=list)
    plans: bool = False
    num_moves: int = 0
    moved_tokens: int = 0


class PrefillAdder:
    """The budgets of one pass: SGLang's rem_total_tokens, rem_input_tokens and rem_chunk_tokens."""

    def __init__(self, state: EngineState, budget: Budget) -> None:
        self.state = state
        self.result = PassResult()
        engine = state.engine
        self._page = engine.page_size
        jobs = [*state.running_jobs(), *(progress.job for progress in state.parked)]
        self._reserve = state.reserve
        aside_tokens = sum(self._reserve.set_aside_tokens(jobs))
        if isinstance(self._reserve, Headroom):
            aside_tokens += self._reserve.kept_tokens
        self._room = state.pool.room_tokens - aside_tokens - state.num_mixed
        self._input_left = engine.max_prefill_tokens - state.num_mixed
        self._chunk_left = engine.chunked_prefill_size - state.num_mixed
        if budget.prefill_tokens is not None:
            limit_tokens = self._whole_pages(budget.prefill_tokens)
            self._input_left = min(self._input_left, limit_tokens)
            self._chunk_left = min(self._chunk_left, limit_tokens)
        self._chunk_limit = budget.chunk_tokens
        self._slots = state.free_slots
        self._adapters = state.adapters

    def run(self, waiting: Sequence[Progress]) -> PassResult:
        """Admit waiting requests in order, up to the first that does not fit. As in SGLang, a
        request whose adapter finds no room is skipped."""
        state = self.state
        if state.chunked is not None:
            self._continue_chunk(state.chunked, waiting)
        admitted = set()
        for candidate in waiting:
            if self._room > 0 and (self._input_left <= 0 or self._chunk_left <= 0):
                break
            if not state.has_adapter(candidate, self._adapters):
                continue
            cached = state.pool.cached(candidate)
            if state.is_full or not self._fits(candidate, cached):
                # Whether a request that can be preempted runs, or is about to.
                state.is_full |= bool(self.result.parts) or state.runs_any
                break
            if not self._admit(candidate, cached):
                break
            admitted.add(candidate)
            self._adapters.add(candidate.request.adapter)
            if self._room <= 0:
                state.is_full = True
                break
        if admitted:
            state.queue = [progress for progress in state.queue if progress not in admitted]
        return self.result

    def _whole_pages(self, num_tokens: int) -> int:
        return max(1, num_tokens // self._page) * self._page

    def _fits(self, progress: Progress, cached: Cached) -> bool:
        needed_tokens = self._reserve.needed_tokens(progress.job)
        return self._slots > 0 and needed_tokens - cached.locked_tokens < self._room

    def _charge(self, num_tokens: int, answer_tokens: int) -> int:
        """Subtract tokens from the room, and return them in full pages."""
        paged = -(-num_tokens // self._page) * self._page
        self._room -= paged + self._page + answer_tokens
        return paged

    def _continue_chunk(self, progress: Progress, waiting: Sequence[Progress]) -> None:
        state = self.state
        left = progress.fill_tokens - progress.prefilled_tokens
        budget = min(self._chunk_left, int(self._room))
        if budget <= 0:
            budget = self._chunk_left  # it must go on, or its KV is never given back
        limit = self._chunk_limit
        if limit is not None:
            limit = self._whole_pages(limit)
        elif isinstance(state.policy, StockPolicy):
            works = (p.fill_tokens - state.pool.found_tokens(p) for p in waiting)
            limit = state.policy.chunk_limit(left, self._chunk_left, self._page, works)
        if limit is not None:
            budget = min(budget, limit)
        self._slots -= 1
        answer_tokens = self._answer_tokens(progress)
        self._prefill(progress, progress.prefilled_tokens, min(left, budget), answer_tokens)

    def _admit(self, progress: Progress, cached: Cached) -> bool:
        """Admit a request that fits. Return False if the pass's compute budget does not allow
        it."""
        state = self.state
        new = progress.fill_tokens - cached.num_tokens
        if -(-new // self._page) * self._page > self._chunk_left:
            new = self._chunk_left // self._page * self._page
            if new <= 0 or state.chunked is not None:
                return False
        self._slots -= 1
        self._room -= cached.evictable_tokens + cached.host_tokens
        state.pool.enter(progress, cached)
        self._prefill(progress, cached.num_tokens, new, self._answer_tokens(progress))
        return True

    def _answer_tokens(self, progress: Progress) -> int:
        """Return the tokens to reserve. SGLang's _update_prefill_budget counts generated tokens
        twice."""
        job = progress.job
        num_tokens = job.generated_tokens + self._reserve.left_tokens(job)
        return min(num_tokens, self.state.engine.clip_max_new_tokens)

    def _prefill(
        self, progress: Progress, done_tokens: int, new_tokens: int, answer_tokens: int
    ) -> None:
        """Add a part to the prefill step. answer_tokens: to reserve if it completes the prompt."""
        state, pages = self.state, self.state.pool.pages
        completes = done_tokens + new_tokens == progress.fill_tokens
        paged = self._charge(new_tokens, answer_tokens if completes else 0)
        self._input_left -= paged
        self._chunk_left -= paged
        state.pool.hold(pages(done_tokens + new_tokens) - pages(done_tokens))
        if not completes:
            state.chunked = progress
        elif state.chunked is progress:
            state.chunked = None
        self.result.parts.append(Part(progress, done_tokens, new_tokens, completes))
