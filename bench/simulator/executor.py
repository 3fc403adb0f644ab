"""Carries out a scheduling pass on the simulated engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.simulator.prefill_adder import PassResult, PrefillAdder
from bench.simulator.request import Progress
from bench.simulator.state import EngineState
from bench.simulator.stock import StockPolicy, stock_order
from sage_sched.plan import UNLIMITED, Budget, Plan, Preempt
from sage_sched.scheduling_pass import run_pass

# SGLang's WAITING_PREFIX_REFRESH_INTERVAL and WAITING_QUEUE_PREFIX_MATCH_MAX.
_REFRESH_PASSES, _NUM_REFRESHED = 32, 128


def scheduling_pass(engine: PlannedEngine) -> PassResult:
    """Make a scheduling pass, as SGLang does before every step."""
    if not engine.runs_any:
        engine.is_full = False
    policy = engine.policy
    if not isinstance(policy, StockPolicy):
        return engine.planned_pass()
    if (not engine.queue and engine.chunked is None) or _is_closed(engine):
        return PassResult()
    engine.queue = stock_order(engine.queue, policy, engine.core.served_tokens, engine.pool)
    return _admit(engine, UNLIMITED, engine.queue)


class PlannedEngine(EngineState):
    """An engine with its actions in a pass (see sage_sched.scheduling_pass.Engine). result: of the
    latest pass."""

    result: PassResult

    def planned_pass(self) -> PassResult:
        """Make a pass by the plan of one of our policies."""
        self.join_returning()
        self.result = PassResult(plans=self.needs_plan())
        if self.result.plans:
            run_pass(self)
        else:
            self.admit([], UNLIMITED)
        return self.result

    def needs_plan(self) -> bool:
        """Whether a plan may change anything."""
        if self.is_chunking or self.is_short:
            return True
        if not self.queue:
            return False
        num_arrivals = self.core.num_arrivals
        if not self.is_full:
            if not len(self.decode):
                return True
            if not self.core.first_lacks_memory(num_arrivals, self.pool.room_tokens):
                return True
        most_tokens = self.server.reserve_tokens
        if self.can_swap and self.core.may_have_changed(num_arrivals, self.ages(), most_tokens):
            return True
        self.is_full = True
        return False

    def ages(self) -> Iterable[int]:
        """Return the tokens that each running request has."""
        return (progress.age_offset + self.decode.step for progress in self.decode)

    def plan(self) -> Plan:
        return self.core.plan(self.view())

    def is_swapped(self, request: Progress) -> bool:
        return request.swapped

    def preempt(self, actions: Sequence[Preempt]) -> list[Progress]:
        gone: list[Progress] = []
        for action in actions:
            (leaving,) = (progress for progress in self.decode if progress.job is action.job)
            self.result.moved_tokens += self.leave(leaving, action.mode)
            self.result.num_moves += leaving.swapped
            self.num_preemptions[action.to is None, action.mode] += 1
            gone.append(leaving)
        return gone

    def resume(self, requests: Sequence[Progress]) -> list[Progress]:
        for number, progress in enumerate(requests):
            if not self.swap_in(progress):
                return [*requests[number:]]
            self.result.moved_tokens += progress.kv_tokens
            self.result.num_moves += 1
        return []

    def carried_out(
        self, plan: Plan, entering: list[Progress], left: list[Progress], preempted: list[Progress]
    ) -> None:
        return

    def admit(self, visible: Sequence[Progress], budget: Budget) -> None:
        if (visible or self.is_chunking) and not _is_closed(self):
            self._make_room_for_chunk(budget)
            self.result.parts = _admit(self, budget, visible).parts

    def decode_only(self) -> None:
        if self.is_chunking and self.is_short:
            self.admit([], Budget(prefill_tokens=0))

    def _make_room_for_chunk(self, budget: Budget) -> None:
        if (chunked := self.chunked) is None:
            return
        left_tokens = chunked.fill_tokens - chunked.prefilled_tokens

        def next_tokens() -> int:
            return budget.next_chunk_tokens(left_tokens, self.pass_tokens, self.pool.page_size)

        if self.step_tokens + next_tokens() > self.pool.room_tokens:
            self.retract(next_tokens)


def _admit(state: EngineState, budget: Budget, visible: Sequence[Progress]) -> PassResult:
    """Admit as SGLang does. SGLang looks up the first waiting requests in its radix tree every few
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
    state.is_full |= state.free_slots <= 0
    return state.is_full
