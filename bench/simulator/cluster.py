"""N engines behind a dispatcher, each with a scheduler of its own."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence

from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result, result_of
from bench.simulator.run import check_requests, make_node
from bench.simulator.state import Options
from sage_sched.config import SageConfig


def simulate_cluster(
    engine: Engine,
    num_nodes: int,
    policy_name: str,
    config: SageConfig,
    requests: Sequence[SimRequest],
    options: Options | None = None,
) -> Result:
    """As run.simulate, on num_nodes equal engines. No request follows another.

    A request goes at its arrival to the engine with the fewest unfinished requests, the first of
    these. Only engines on which something may have happened since are looked at.
    """
    began = time.perf_counter()
    check_requests(engine, requests)
    finished: list[Progress] = []
    nodes = [
        make_node(engine, policy_name, config, options or Options(), finished.append)
        for _ in range(num_nodes)
    ]
    alarms: list[tuple[float, int]] = []  # when a node may change; one is its latest alarm
    latest_s = [math.inf] * num_nodes

    def set_alarm(number: int) -> None:
        latest_s[number] = nodes[number].next_change_s()
        heapq.heappush(alarms, (latest_s[number], number))

    for index, request in enumerate(requests):
        woken = []
        while alarms and alarms[0][0] < request.arrival_s:
            alarm_s, number = heapq.heappop(alarms)
            if alarm_s == latest_s[number]:
                nodes[number].advance(request.arrival_s)
                latest_s[number] = math.inf
                woken.append(number)
        number = min(range(num_nodes), key=lambda n: nodes[n].num_outstanding)
        nodes[number].submit(request, index)
        for changed in {*woken, number}:
            set_alarm(changed)
    for node in nodes:
        node.advance(math.inf)
    return result_of(
        engine,
        requests,
        finished,
        prefill_tokens=sum(node.prefill_tokens for node in nodes),
        moved_tokens=sum(node.moved_tokens for node in nodes),
        wall_s=time.perf_counter() - began,
    )
