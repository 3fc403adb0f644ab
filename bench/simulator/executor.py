"""The simulated engine's actions in a scheduling pass."""

from __future__ import annotations

from collections.abc import Sequence

from bench.simulator.prefill_adder import PassResult, PrefillAdder
from bench.simulator.request import Progress
from bench.simulator.state import EngineState
from bench.simulator.stock import StockPolicy, stock_order
from sage_sched.decide import decide
from sage_sched.headroom import Headroom
from sage_sched.plan import UNLIMITED, Budget, Plan, Preempt
from sage_sched.policy import Policy
from sage_sched.scheduling_pass import run_pass

# SGLang's WAITING_PREFIX_REFRESH_INTERVAL and WAITING_QUEUE_PREFIX_MATCH_MAX.
_REFRESH_PASSES, _NUM_REFRESHED = 32, 128


def scheduling_pass(state: EngineState) -> PassResult:
    """Make a scheduling pass, as SGLang does before every step."""
    if not len(state.decode):
        state.batch_is_full = False
    policy = state.policy
    if not isinstance(policy, StockPolicy):
        this = Pass(state, policy)
        run_pass(this)
        return this.result
    if (not state.queue and state.chunked is None) or _is_closed(state):
        return PassResult()
    state.queue = stock_order(state.queue, policy, state.served_tokens, state.pool)
    return _admit(state, UNLIMITED, state.queue)


class Pass:
    """A pass of an engine under one of our policies (see sage_sched.scheduling_pass.Engine)."""

    def __init__(self, state: EngineState, policy: Policy) -> None:
        self.result = PassResult()
        self._state, self._policy = state, policy

    @property
    def queue(self) -> list[Progress]:
        return self._state.queue

    @queue.setter
    def queue(self, queue: list[Progress]) -> None:
        self._state.queue = queue

    @property
    def num_arrivals_planned(self) -> int:
        return self._state.num_arrivals_planned

    @num_arrivals_planned.setter
    def num_arrivals_planned(self, num_arrivals: int) -> None:
        self._state.num_arrivals_planned = num_arrivals

    @property
    def is_full(self) -> bool:
        return self._state.batch_is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        self._state.batch_is_full = is_full

    @property
    def num_arrivals(self) -> int:
        return self._state.num_queued

    @property
    def runs_any(self) -> bool:
        return len(self._state.decode) > 0

    @property
    def is_chunking(self) -> bool:
        return self._state.chunked is not None

    def plan(self) -> Plan:
        state = self._state
        is_short = state.step_tokens > state.pool.room_tokens
        if not state.queue and state.chunked is None and not is_short:
            return Plan(order=None)
        plan = decide(state.view(), self._policy, state.limits)
        if plan.order is not None:
            state.headroom = Headroom(
                plan.headroom_steps, state.pool.page_size, 1, plan.kept_tokens
            )
        return plan

    def is_swapped(self, request: Progress) -> bool:
        return request.swapped

    def preempt(self, action: Preempt) -> Progress:
        state = self._state
        (gone,) = (progress for progress in state.decode if progress.job is action.job)
        self.result.moved_tokens += state.leave(gone, action.mode)
        state.num_preemptions[action.to is None, action.mode] += 1
        return gone

    def resume(self, requests: Sequence[Progress]) -> list[Progress]:
        for number, progress in enumerate(requests):
            if not self._state.swap_in(progress):
                return [*requests[number:]]
            self.result.moved_tokens += progress.kv_tokens
        return []

    def carried_out(
        self, plan: Plan, entering: list[Progress], left: list[Progress], yielded: list[Progress]
    ) -> None:
        return

    def admit(self, visible: Sequence[Progress], budget: Budget) -> None:
        if (visible or self.is_chunking) and not _is_closed(self._state):
            self._make_room_for_chunk(budget)
            self.result.parts = _admit(self._state, budget, visible).parts

    def decode_only(self) -> None:
        if self.is_chunking and self._state.step_tokens > self._state.pool.room_tokens:
            self.admit([], Budget(prefill_tokens=0))

    def _make_room_for_chunk(self, budget: Budget) -> None:
        state, chunked = self._state, self._state.chunked
        if chunked is None:
            return
        left_tokens = chunked.fill_tokens - chunked.prefilled_tokens

        def next_tokens() -> int:
            return budget.next_chunk_tokens(left_tokens, state.pass_tokens, state.pool.page_size)

        if state.step_tokens + next_tokens() > state.pool.room_tokens:
            state.retract(next_tokens)


def _admit(state: EngineState, budget: Budget, visible: Sequence[Progress]) -> PassResult:
    """Admit as SGLang does. It looks up the first waiting requests in its radix tree every few
    passes, unless its policy has just done so (SchedulePolicy._touch_waiting_prefixes)."""
    if not (isinstance(state.policy, StockPolicy) and state.policy.asks_tree):
        if state.num_passes % _REFRESH_PASSES == 0:
            for progress in reversed(visible[:_NUM_REFRESHED]):
                state.pool.found_tokens(progress)
        state.num_passes += 1
    return PrefillAdder(state, budget).run(list(visible))


def _is_closed(state: EngineState) -> bool:
    """Return whether SGLang admits no request."""
    if state.chunked is not None:
        return False
    state.batch_is_full |= state.free_slots <= 0
    return state.batch_is_full
