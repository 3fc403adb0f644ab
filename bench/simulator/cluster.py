"""Simulates N engines behind a router, each with a scheduler of its own."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from bench.policies.router import Router
from bench.simulator.ledger import Ledger, Newcomer
from bench.simulator.node import Node
from bench.simulator.prefix_index import BLOCK_TOKENS
from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result
from bench.simulator.run import check_requests, make_node, result_of
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig

# Seconds between two reports of a node to the router. The router knows at once which requests it
# sends itself. SGLang's own schedulers report every 15 decode steps, and routers poll servers every
# second or less often.
REPORT_S = 1.0


class Dispatcher:
    """Sends requests to engines behind a router, and collects their results. A request that follows
    another comes when that one has ended and the pause is over. Raises ValueError, see
    check_requests."""

    def __init__(self, engine: Engine, requests: Sequence[SimRequest]) -> None:
        check_requests(engine, requests)
        self._engine, self._requests = engine, requests
        self._finished: list[Progress] = []
        self._coming: list[tuple[float, int]] = []  # a heap
        self._followers = defaultdict[int, list[int]](list)
        for index, request in enumerate(requests):
            if request.follows is None:
                heapq.heappush(self._coming, (request.arrival_s, index))
            else:
                self._followers[request.follows].append(index)

    def _on_finish(self, progress: Progress) -> None:
        self._finished.append(progress)
        for index in self._followers.get(progress.index, ()):
            comes_s = progress.last_token_s + self._requests[index].pause_s
            heapq.heappush(self._coming, (comes_s, index))

    def result(self, nodes: Sequence[Node]) -> Result:
        """Return the result of all requests, once they are served."""
        return result_of(self._engine, self._requests, self._finished, nodes)


class Cluster(Dispatcher):
    """Equal engines, each of which serves requests from prefill to the last token; see
    run.simulate. A request that follows another may go to a different engine."""

    def __init__(
        self,
        engine: Engine,
        policy_name: str,
        config: SageConfig,
        requests: Sequence[SimRequest],
        options: Options,
        num_nodes: int,
    ) -> None:
        super().__init__(engine, requests)
        self.nodes = [
            make_node(engine, policy_name, config, options, self._on_finish)
            for _ in range(num_nodes)
        ]
        self._ledger = Ledger(num_nodes, engine.server_facts())
        self._alarms: list[tuple[float, int]] = []  # when a node may change; outdated entries stay
        self._latest_s = [math.inf] * num_nodes

    def serve(self, router: Router, report_s: float = REPORT_S) -> Result:
        """Serve all requests, each from its arrival on the engine that the router picks, by reports
        that are up to report_s old."""
        heard_s = 0.0
        while self._comes_another():
            now_s, index = heapq.heappop(self._coming)
            # The last report before the request; earlier reports add nothing.
            report_at_s = now_s // report_s * report_s
            if report_at_s > heard_s:
                heard_s = report_at_s
                for number, node in enumerate(self.nodes):
                    node.advance(heard_s)
                    self._ledger.report(number, node.ages(), heard_s)
                    self._set_alarm(number)
            self._send(router, index, now_s)
        for node in self.nodes:
            node.advance(math.inf)
        return self.result(self.nodes)

    def _send(self, router: Router, index: int, now_s: float) -> None:
        request = replace(self._requests[index], arrival_s=now_s)
        newcomer = newcomer_of(request)
        number = router.pick(self._ledger.view(newcomer, now_s))
        self._ledger.sent(index, number, newcomer, now_s)
        self.nodes[number].submit(request, index)
        self._set_alarm(number)

    def _comes_another(self) -> bool:
        """Return whether another request is to come. Some requests come when another one ends. If
        that may be before the next arrival, the engines run until then."""
        while self._followers and self._alarms:
            alarm_s, number = self._alarms[0]
            if self._coming and self._coming[0][0] <= alarm_s:
                break
            heapq.heappop(self._alarms)
            if alarm_s == self._latest_s[number]:
                self.nodes[number].advance(math.nextafter(alarm_s, math.inf))
                self._set_alarm(number)
        return bool(self._coming)

    def _set_alarm(self, number: int) -> None:
        self._latest_s[number] = self.nodes[number].next_change_s()
        if self._followers and self._latest_s[number] < math.inf:
            heapq.heappush(self._alarms, (self._latest_s[number], number))


def newcomer_of(request: SimRequest) -> Newcomer:
    """Return the request as a router sees it."""
    return Newcomer(
        request.input_tokens,
        request.max_new_tokens,
        request.distribution,
        _keys(request),
        request.hints,
    )


def _keys(request: SimRequest) -> list[Hashable]:
    """Return the keys of its prompt's blocks. A token is identified by its stream and its place
    there."""
    keys: list[Hashable] = []
    before = 0
    for stream, first, end in request.spans:
        places = range(-before % BLOCK_TOKENS or BLOCK_TOKENS, end - first + 1, BLOCK_TOKENS)
        keys.extend((stream, first + place) for place in places)
        before += end - first
    return keys
