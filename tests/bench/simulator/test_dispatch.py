"""Many engines behind a router, and engines that prefill and engines that decode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from bench.policies.routers import ROUTERS, router_named
from bench.simulator.apart import simulate_apart
from bench.simulator.cluster import simulate_cluster
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.job import Hints
from tests.bench.fingerprint import fingerprint
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
together = partial(simulate_cluster, SMALL)
apart = partial(simulate_apart, SMALL)


@pytest.mark.parametrize("options", [STAY, CHECKED], ids=["stay", "preempt"])
def test_a_cluster_of_one_is_the_engine(options: Options) -> None:
    first = mixed(90, 6.0, 8)
    later = [replace(each, follows=i, pause_s=0.25) for i, each in enumerate(mixed(60, 4.0, 13))]
    alone = simulate(SMALL, "sage", CONFIG, [*first, *later], options)
    found = together("sage", CONFIG, [*first, *later], options, num_nodes=1)
    assert found.ttlt_s == pytest.approx(alone.ttlt_s)


def test_requests_go_where_the_fewest_are() -> None:
    each_alone = [request(0.01 * i, 10, 50) for i in range(8)]
    # A finished request counts no more: the third goes to the first engine, idle again.
    one_ends = [request(0.0, 10, 2), request(0.0, 10, 300), request(2.0, 10, 2)]
    # A request comes 0.5 s after the answer that it follows, wherever it goes.
    asked = [request(1.0 * i, 10, 20 + 7 * i) for i in range(6)]
    asked += [request(0.0, 12, 5, follows=i, pause_s=0.5) for i in range(6)]
    for requests, num_nodes in ((each_alone, 8), (one_ends, 2), (asked, 3)):
        result = together("fcfs", CONFIG, requests, CHECKED, num_nodes=num_nodes)
        assert result.ttlt_s == pytest.approx(result.alone_s)
    assert result.arrival_s[6:] == pytest.approx((result.arrival_s + result.ttlt_s)[:6] + 0.5)


def test_clusters_however_old_the_reports() -> None:
    hints, found = Hints(ttft_slo_ms=800.0), {}
    requests = [replace(each, hints=hints) for each in mixed(120, 20.0, 11)]
    for name in ROUTERS:
        results = [
            together("sage", CONFIG, requests, CHECKED, num_nodes=3,
                     router=router_named(name), report_s=report_s)
            for report_s in (0.01, 1.0, 1e6)
        ]  # fmt: skip
        found[name] = fingerprint([result.ttlt_s for result in results])
    assert found == {
        "predicted-cost": "4cfcaa89", "gorouting": "16e88729", "round_robin": "6f991345",
        "total_requests": "24d539d8", "total_tokens": "70535d12", "power_of_two": "199db23e",
        "cache_aware": "24d539d8", "min-load": "01beb4c4",
    }  # fmt: skip


def test_apart_prefill_transfer_and_decode_follow_one_another_beside_other_prefills() -> None:
    result = apart("fcfs", CONFIG, [request(1.0, 100, 30)])
    sent_s = 100 * SMALL.swap_token_s
    assert result.ttft_s[0] == pytest.approx(STEP_TIME.prefill_s(1, 100, 5000) + sent_s)
    assert result.ttlt_s[0] == pytest.approx(result.alone_s[0] + sent_s)
    requests = [request(0.0, 10, 300), request(1.0, 400, 2), request(2.0, 400, 2)]
    prefill_s = STEP_TIME.prefill_s(1, 400, 0)
    assert apart("fcfs", CONFIG, requests).longest_gap_s.max() < prefill_s


def test_sglang_reserves_decode_tokens_and_we_headroom() -> None:
    def last_ttft_s(policy: str, reserved_tokens: int) -> float:
        engine = replace(MANY_SLOTS, reserved_decode_tokens=reserved_tokens)
        requests = [request(0.0, 16, 30, 40) for _ in range(20)]
        return float(np.max(simulate_apart(engine, policy, CONFIG, requests).ttft_s))

    little_s = last_ttft_s("fcfs", 8)
    assert last_ttft_s("fcfs", 400) > 2 * little_s
    assert last_ttft_s("fcfs-fill", 400) == pytest.approx(little_s)


@pytest.mark.parametrize(
    ("policy", "num_nodes", "wanted"),
    [
        ("fcfs", 1, "ec21f56d"),
        ("shortest-prefill-first", 1, "7ae7b280"),
        ("sage", 1, "5adb9e70"),
        ("fcfs-fill", 1, "b3892b01"),
        ("sage", 2, "f6779dd8"),
    ],
)
def test_apart_though_memory_runs_out(policy: str, num_nodes: int, wanted: str) -> None:
    engine = replace(MANY_SLOTS, reserved_decode_tokens=8)
    requests = mixed(150 * num_nodes, 12.0 * num_nodes, 3)
    more = {"num_nodes": num_nodes, "router": router_named("gorouting")}
    result = simulate_apart(engine, policy, CONFIG, requests, **more)
    assert result.num_retractions.sum() + result.num_preemptions.sum() > 0
    assert result.prefill_tokens == result.input_tokens.sum()  # nothing is computed twice
    assert fingerprint((result.ttft_s, result.ttlt_s, result.moved_tokens)) == wanted
