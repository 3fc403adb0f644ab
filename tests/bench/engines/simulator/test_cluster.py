"""Many engines behind one dispatcher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.engines.simulator.cluster import _keys, simulate_cluster
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.policies.routers import ROUTERS, router_named
from sage_sched.config import SageConfig
from sage_sched.routing import BLOCK_TOKENS
from tests.bench.engines.simulator.invariants import watch
from tests.bench.engines.simulator.traffic import SMALL, mixed, request

pytestmark = pytest.mark.slow

CONFIG = SageConfig()


@pytest.mark.parametrize("preempt", [False, True])
def test_a_cluster_of_one_is_the_engine(preempt: bool) -> None:
    requests = mixed(150, 6.0, 8)
    options = Options(preempt=preempt, watch=watch)
    alone = simulate(SMALL, "sage", CONFIG, requests, options)
    cluster = simulate_cluster(SMALL, "sage", CONFIG, requests, options, num_nodes=1)
    assert cluster.ttlt_s == pytest.approx(alone.ttlt_s)


def test_requests_go_where_the_fewest_are() -> None:
    requests = [request(0.01 * i, 10, 50) for i in range(8)]
    result = simulate_cluster(SMALL, "fcfs", CONFIG, requests, Options(watch=watch), num_nodes=8)
    assert result.ttlt_s == pytest.approx(result.alone_s)
    # A finished request counts no more: the third goes to the first engine, idle again.
    requests = [request(0.0, 10, 2), request(0.0, 10, 300), request(2.0, 10, 2)]
    result = simulate_cluster(SMALL, "fcfs", CONFIG, requests, Options(watch=watch), num_nodes=2)
    assert result.ttlt_s == pytest.approx(result.alone_s)


def test_ten_engines_serve_ten_times_the_load() -> None:
    apart = [simulate(SMALL, "sage", CONFIG, mixed(100, 3.0, seed)).ttlt_s for seed in range(20)]
    ten = simulate_cluster(
        SMALL, "sage", CONFIG, mixed(1000, 30.0, 9), Options(watch=watch), num_nodes=10
    )
    assert float(np.mean(ten.ttlt_s)) < 1.1 * float(np.mean(apart))


def test_the_same_input_gives_the_same_bytes() -> None:
    requests = mixed(300, 20.0, 10)
    runs = [simulate_cluster(SMALL, "sage", CONFIG, requests, num_nodes=4) for _ in range(2)]
    assert runs[0].ttlt_s.tobytes() == runs[1].ttlt_s.tobytes()


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("report_s", [0.01, 1.0, 1e6])
def test_no_dispatcher_loses_a_request_however_old_its_news(name: str, report_s: float) -> None:
    requests = mixed(120, 20.0, 11)
    options = Options(preempt=True, watch=watch)
    result = simulate_cluster(
        SMALL,
        "sage",
        CONFIG,
        requests,
        options,
        router=router_named(name),
        report_s=report_s,
        num_nodes=3,
    )
    assert len(result.ttlt_s) == 120


def test_a_request_that_follows_comes_after_the_answer_wherever_it_goes() -> None:
    first = [request(1.0 * i, 10, 20 + 7 * i) for i in range(6)]
    later = [replace(request(0.0, 12, 5), follows=i, pause_s=0.5) for i in range(6)]
    result = simulate_cluster(
        SMALL, "fcfs", CONFIG, [*first, *later], Options(watch=watch), num_nodes=3
    )
    ended_s = result.arrival_s + result.ttlt_s
    assert result.arrival_s[6:] == pytest.approx(ended_s[:6] + 0.5)
    assert result.ttlt_s == pytest.approx(result.alone_s)


def test_followers_on_one_engine_are_served_as_without_a_router() -> None:
    first = mixed(60, 4.0, 12)
    later = [replace(each, follows=i, pause_s=0.25) for i, each in enumerate(mixed(60, 4.0, 13))]
    alone = simulate(SMALL, "sage", CONFIG, [*first, *later])
    cluster = simulate_cluster(SMALL, "sage", CONFIG, [*first, *later], num_nodes=1)
    assert cluster.ttlt_s == pytest.approx(alone.ttlt_s)


def test_a_prefix_draws_its_like_to_one_engine() -> None:
    shared = [
        replace(request(0.5 * i, 900, 5), spans=((7, 0, 800), (100 + i, 0, 100))) for i in range(12)
    ]
    computed = {
        name: simulate_cluster(
            SMALL,
            "sage",
            CONFIG,
            shared,
            Options(watch=watch),
            router=router_named(name),
            num_nodes=4,
        ).prefill_tokens
        for name in ("predicted-cost", "round_robin")
    }
    assert computed["predicted-cost"] < 0.7 * computed["round_robin"]


def test_blocks_of_a_prompt_are_known_by_where_they_end() -> None:
    long = replace(request(0.0, 150, 5), spans=((1, 0, 100), (2, 0, 50)))
    assert _keys(long) == [(1, BLOCK_TOKENS), (2, 2 * BLOCK_TOKENS - 100)]
    assert _keys(replace(long, spans=((1, 0, 64), (3, 0, 86)))) == [(1, 64), (3, 64)]
    assert _keys(request(0.0, 150, 5)) == []
