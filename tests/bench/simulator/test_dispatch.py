"""Many engines behind a dispatcher, and engines that prefill and engines that decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.policies.routers import ROUTERS, router_named
from bench.simulator.apart import simulate_apart
from bench.simulator.cluster import simulate_cluster
from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from tests.bench.simulator.traffic import (
    CHECKED,
    CONFIG,
    MANY_SLOTS,
    SMALL,
    STAY,
    STEP_TIME,
    mixed,
    request,
)  # fmt: skip

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


def test_requests_go_where_the_fewest_are() -> None:
    each_alone = [request(0.01 * i, 10, 50) for i in range(8)]
    # A finished request counts no more: the third goes to the first engine, idle again.
    one_ends = [request(0.0, 10, 2), request(0.0, 10, 300), request(2.0, 10, 2)]
    for requests, num_nodes in ((each_alone, 8), (one_ends, 2)):
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


def served_apart(
    policy: str, requests: list[SimRequest], engine: Engine = SMALL, **more: Any
) -> Result:
    return simulate_apart(engine, policy, CONFIG, requests, **more)


def test_alone_a_request_is_prefilled_sent_and_decoded() -> None:
    result = served_apart("fcfs", [request(1.0, 100, 30)])
    sent_s = 100 * SMALL.swap_token_s
    assert result.ttft_s[0] == pytest.approx(STEP_TIME.prefill_s(1, 100, 5000) + sent_s)
    assert result.ttlt_s[0] == pytest.approx(result.alone_s[0] + sent_s)


def test_decoding_requests_do_not_wait_for_a_prefill() -> None:
    requests = [request(0.0, 10, 300), request(1.0, 400, 2), request(2.0, 400, 2)]
    assert served_apart("fcfs", requests).longest_gap_s.max() < STEP_TIME.prefill_s(1, 400, 0)


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first", "sage", "fcfs-fill"])
def test_no_request_is_lost_though_memory_runs_out(policy: str) -> None:
    engine = replace(MANY_SLOTS, reserved_decode_tokens=8)
    result = served_apart(policy, mixed(150, 12.0, 3), engine)
    assert result.num_retractions.sum() + result.num_preemptions.sum() > 0
    assert result.moved_tokens > 0
    assert result.prefill_tokens == result.input_tokens.sum()  # nothing is computed twice


def test_sglang_reserves_decode_tokens_and_we_headroom() -> None:
    requests = [request(0.0, 16, 30, 40) for _ in range(20)]

    def last_ttft_s(policy: str, reserved_tokens: int) -> float:
        engine = replace(MANY_SLOTS, reserved_decode_tokens=reserved_tokens)
        return float(np.max(served_apart(policy, requests, engine).ttft_s))

    little_s = last_ttft_s("fcfs", 8)
    assert last_ttft_s("fcfs", 400) > 2 * little_s
    assert last_ttft_s("fcfs-fill", 400) == pytest.approx(little_s)


@pytest.mark.parametrize("name", ["total_requests", "gorouting"])
def test_pairs_of_many_engines_serve_as_many_times_the_load(name: str) -> None:
    alone = served_apart("sage", mixed(100, 3.0, 4))
    four = served_apart("sage", mixed(400, 12.0, 4), num_nodes=4, router=router_named(name))
    assert float(np.mean(four.ttlt_s)) < 1.2 * float(np.mean(alone.ttlt_s))
