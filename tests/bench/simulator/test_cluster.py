"""Many engines behind one dispatcher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.policies.routers import ROUTERS, router_named
from bench.simulator.cluster import simulate_cluster
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, STAY, mixed, request

pytestmark = pytest.mark.slow


def served(
    requests: list[SimRequest],
    num_nodes: int,
    policy: str = "fcfs",
    options: Options = CHECKED,
    **more: Any,
) -> Result:
    return simulate_cluster(SMALL, policy, CONFIG, requests, options, num_nodes=num_nodes, **more)


@pytest.mark.parametrize("options", [STAY, CHECKED], ids=["stay", "preempt"])
def test_a_cluster_of_one_is_the_engine(options: Options) -> None:
    first = mixed(90, 6.0, 8)
    later = [replace(each, follows=i, pause_s=0.25) for i, each in enumerate(mixed(60, 4.0, 13))]
    alone = simulate(SMALL, "sage", CONFIG, [*first, *later], options)
    assert served([*first, *later], 1, "sage", options).ttlt_s == pytest.approx(alone.ttlt_s)


@pytest.mark.parametrize(
    ("requests", "num_nodes"),
    [
        ([request(0.01 * i, 10, 50) for i in range(8)], 8),
        # A finished request counts no more: the third goes to the first engine, idle again.
        ([request(0.0, 10, 2), request(0.0, 10, 300), request(2.0, 10, 2)], 2),
    ],
)
def test_requests_go_where_the_fewest_are(requests: list[SimRequest], num_nodes: int) -> None:
    result = served(requests, num_nodes)
    assert result.ttlt_s == pytest.approx(result.alone_s)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("report_s", [0.01, 1.0, 1e6])
def test_no_dispatcher_loses_a_request_however_old_its_news(name: str, report_s: float) -> None:
    requests = mixed(120, 20.0, 11)
    result = served(requests, 3, "sage", router=router_named(name), report_s=report_s)
    assert len(result.ttlt_s) == 120


def test_a_request_that_follows_comes_after_the_answer_wherever_it_goes() -> None:
    first = [request(1.0 * i, 10, 20 + 7 * i) for i in range(6)]
    later = [request(0.0, 12, 5, follows=i, pause_s=0.5) for i in range(6)]
    result = served([*first, *later], 3)
    ended_s = result.arrival_s + result.ttlt_s
    assert result.arrival_s[6:] == pytest.approx(ended_s[:6] + 0.5)
    assert result.ttlt_s == pytest.approx(result.alone_s)


def test_a_prefix_draws_its_like_to_one_engine() -> None:
    shared = [request(0.5 * i, 900, 5, spans=((7, 0, 800), (99 + i, 0, 100))) for i in range(12)]
    prefix, turns = (
        served(shared, 4, "sage", router=router_named(name)).prefill_tokens
        for name in ("predicted-cost", "round_robin")
    )
    assert prefix < 0.7 * turns
