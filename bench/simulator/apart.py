"""Simulates engines of one kind, some of which prefill and others decode
(sglang/srt/disaggregation)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from bench.policies.router import Router
from bench.simulator.cluster import Dispatcher, newcomer_of
from bench.simulator.executor import PlannedEngine
from bench.simulator.kv import DecodeKv
from bench.simulator.ledger import Ledger
from bench.simulator.node import Node
from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result
from bench.simulator.run import engine_and_policy
from bench.simulator.state import Options
from bench.simulator.stock import FcfsPolicy, StockPolicy
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.plan import Budget, PreemptionMode
from sage_sched.view import SchedulerView

_ONE_TOKEN = LengthDistribution.from_samples([1], "truth")


class Apart(Dispatcher):
    """num_nodes prefill engines and as many decode engines, behind one router; see run.simulate.

    A request's KV moves at the pace of Engine.swap_token_s, while steps go on. A stock policy
    orders the prefill engines; SGLang's decode servers are first come, first served.
    """

    def __init__(
        self,
        engine: Engine,
        policy_name: str,
        config: SageConfig,
        requests: Sequence[SimRequest],
        options: Options,
        num_nodes: int,
    ) -> None:
        def prefill_node() -> Node:
            tuned, policy = engine_and_policy(engine, policy_name, config)
            at_once = replace(options, prediction_delay_s=0.0)
            return Node(tuned, policy, config, at_once, self._on_prefilled)

        def decode_node() -> _DecodeNode:
            tuned, policy = engine_and_policy(engine, policy_name, config)
            if isinstance(policy, StockPolicy):
                policy = FcfsPolicy()
            of_node = (tuned, policy, config, options, self._on_finish)
            return _DecodeNode(*of_node, on_room=self._on_room)

        super().__init__(engine, requests)
        self.prefills = [prefill_node() for _ in range(num_nodes)]
        self.decodes = [decode_node() for _ in range(num_nodes)]
        facts = engine.server_facts()
        self._ledgers = Ledger(num_nodes, facts), Ledger(num_nodes, facts)
        self._pair_of: dict[int, tuple[int, int]] = {}

    def serve(self, router: Router) -> Result:
        """Serve all requests, each from its arrival."""
        while len(self._finished) < len(self._requests):
            comes_s = self._coming[0][0] if self._coming else math.inf
            prefill_s, prefill = min((p.next_change_s(), n) for n, p in enumerate(self.prefills))
            decode_s, decode = min((d.next_change_s(), n) for n, d in enumerate(self.decodes))
            if comes_s <= min(prefill_s, decode_s):
                self._send(router, *heapq.heappop(self._coming))
            elif prefill_s <= decode_s:
                self.prefills[prefill].advance(math.nextafter(prefill_s, math.inf))
            else:
                self.decodes[decode].advance(min(comes_s, prefill_s))
        return self.result([*self.prefills, *self.decodes])

    def _send(self, router: Router, now_s: float, index: int) -> None:
        request = replace(self._requests[index], arrival_s=now_s)
        newcomer = newcomer_of(request)
        pair = (0, 0)
        if len(self.decodes) > 1:
            for number, node in enumerate(self.decodes):
                self._ledgers[1].report(number, node.ages(), now_s)
            views = [ledger.view(newcomer, now_s) for ledger in self._ledgers]
            pair = router.pick_pair(*views)
            for ledger, number in zip(self._ledgers, pair, strict=True):
                ledger.sent(index, number, newcomer, now_s)
        self._pair_of[index] = pair
        self.decodes[pair[1]].submit(request, index)

    def _on_room(self, progress: Progress, now_s: float) -> None:
        prefill = self.prefills[self._pair_of[progress.index][0]]
        prefill.submit(prompt_of(progress.request), progress.index, now_s)

    def _on_prefilled(self, progress: Progress) -> None:
        prefill, decode = self._pair_of[progress.index]
        self._ledgers[0].ended(progress.index, prefill, progress.last_token_s)
        transfer_s = progress.request.input_tokens * self._engine.swap_token_s
        self.decodes[decode].lands(progress.index, progress.last_token_s + transfer_s)


def prompt_of(request: SimRequest) -> SimRequest:
    """Return the request as the prefill engine sees it."""
    return replace(request, output_tokens=1, max_new_tokens=1, distribution=_ONE_TOKEN)


class _DecodeState(PlannedEngine):
    """A decode engine: its passes prefill nothing, and admitted requests get KV memory.

    parked: admitted requests whose KV has not arrived yet.
    give_room: see _DecodeNode.
    """

    kv_type = DecodeKv
    give_room: Callable[[Sequence[Progress], int], None]

    def view(self) -> SchedulerView:
        on_the_way = [progress.job for progress in self.parked]
        for job in on_the_way:
            job.held_tokens = job.input_tokens
        view = super().view()
        return replace(view, running=[*view.running, *on_the_way])

    def ages(self) -> Iterable[int]:
        return (*super().ages(), *(progress.generated_tokens for progress in self.parked))

    def admit(self, visible: Sequence[Progress], budget: Budget) -> None:
        if visible and not self.is_full:
            self.give_room(visible, self.core.headroom.num_steps)

    def decode_only(self) -> None:
        self.admit([p for p in self.queue if not p.swapped], Budget())


class _DecodeNode(Node):
    """Simulates one decode engine. on_room: called with each admitted request, and the time."""

    State = _DecodeState
    state: _DecodeState

    def __init__(self, *of_node: Any, on_room: Callable[[Progress, float], None]) -> None:
        """of_node: the arguments of Node."""
        super().__init__(*of_node)
        self.state.give_room = self.give_room
        self._on_room = on_room
        self._landing: list[tuple[float, int]] = []  # a heap

    def lands(self, index: int, at_s: float) -> None:
        """Schedule the arrival of the KV of this request's prompt."""
        heapq.heappush(self._landing, (at_s, index))

    def next_change_s(self) -> float:
        if self.state.has_work:
            return self.now_s
        return max(self.now_s, self._next_event_s())

    def ages(self) -> dict[Hashable, int]:
        return {**super().ages(), **{progress.index: 0 for progress in self.state.parked}}

    def advance(self, until_s: float) -> None:
        """Advance to the end of the first step that ends at until_s or later. If a request is
        admitted, stop after the next step."""
        state = self.state
        while self.now_s < until_s:
            self._receive()
            state.now_s = self.now_s
            num_parked = len(state.parked)
            self._pass()
            if len(state.decode):
                self._decode(until_s if len(state.parked) == num_parked else self.now_s)
            elif len(state.parked) == num_parked and not state.returning:
                next_s = min(until_s, self._next_event_s())
                if next_s == math.inf:
                    if state.queue or state.parked:
                        raise RuntimeError("requests wait, but none can be admitted")
                    return
                self.now_s = max(self.now_s, next_s)
            if len(state.parked) > num_parked:
                return

    def _next_event_s(self) -> float:
        landing_s = self._landing[0][0] if self._landing else math.inf
        return min(super()._next_event_s(), landing_s)

    def _receive(self) -> None:
        super()._receive()
        while self._landing and self._landing[0][0] <= self.now_s:
            _, index = heapq.heappop(self._landing)
            (progress,) = (p for p in self.state.parked if p.index == index)
            self.state.parked.remove(progress)
            self._first_token(progress)

    def _pass(self) -> None:
        state = self.state
        if not state.runs_any:
            state.is_full = False
        if isinstance(self._policy, StockPolicy):
            self.give_room(state.queue, self.state.engine.reserved_decode_tokens)
            return
        result = self._result = state.planned_pass()
        self._move(result.moved_tokens, result.num_moves)

    def give_room(self, waiting: Sequence[Progress], reserved_tokens: int) -> None:
        """Resume and admit requests as SGLang's resume_retracted_reqs and pop_preallocated do, up
        to the first request that does not fit.

        reserved_tokens: tokens to keep free for each admitted request.
        """
        state, gone = self.state, set[Progress]()
        for progress in waiting:
            if not self._fits(progress, reserved_tokens):
                state.is_full = bool(len(state.decode) or state.parked)
                break
            gone.add(progress)
            if progress.swapped:
                self._move(progress.kv_tokens, 1)
                state.swap_in(progress)
                state.join_returning()
                continue
            state.pool.hold(state.pool.pages(progress.request.input_tokens))
            state.parked.append(progress)
            self._on_room(progress, self.now_s)
        state.queue = [progress for progress in state.queue if progress not in gone]

    def _fits(self, progress: Progress, reserved_tokens: int) -> bool:
        state = self.state
        running, clip_tokens = state.decode, state.engine.clip_max_new_tokens

        def most_tokens(one: Progress) -> int:
            """Return the KV of a request at its cap, minus the KV of the running requests."""
            cap_tokens = min(one.request.max_new_tokens, clip_tokens)
            return one.request.input_tokens + cap_tokens - running.context_tokens

        num_pages = state.pool.pages(progress.fill_tokens)
        own_tokens = num_pages * state.pool.page_size + reserved_tokens
        kept_tokens = reserved_tokens * (len(running) + len(state.parked))
        if not progress.swapped:
            own_tokens = max(own_tokens, most_tokens(progress))
            kept_tokens = max([kept_tokens, *map(most_tokens, running)])
        return state.free_slots > 0 and own_tokens + kept_tokens <= state.pool.room_tokens

    def _retract(self) -> None:
        """Swap requests out to host memory. Under SGLang's policies they come back before others
        are admitted."""
        state, order = self.state, self.state.retention_order()
        retracted: list[Progress] = []
        while not retracted or state.decode.pages_needed(1) > state.pool.room_pages:
            progress = order.pop()
            self._move(state.leave(progress, PreemptionMode.SWAP), 1)
            progress.num_retractions += 1
            retracted.append(progress)
        num_away = sum(progress.swapped for progress in state.queue)
        state.queue[num_away:num_away] = retracted
        state.is_full = False
        state.core.plan_again()
