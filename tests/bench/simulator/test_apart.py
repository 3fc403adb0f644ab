"""Engines that prefill and engines that decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.policies.routers import router_named
from bench.simulator.apart import simulate_apart
from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from tests.bench.simulator.traffic import (
    CONFIG,
    MANY_SLOTS,
    SMALL,
    STAY,
    STEP_TIME,
    known,
    mixed,
    request,
)


def served(policy: str, requests: list[SimRequest], engine: Engine = SMALL, **more: Any) -> Result:
    return simulate_apart(engine, policy, CONFIG, requests, **more)


def test_alone_a_request_is_prefilled_sent_and_decoded() -> None:
    result = served("fcfs", [request(1.0, 100, 30)])
    sent_s = 100 * SMALL.swap_token_s
    assert result.ttft_s[0] == pytest.approx(STEP_TIME.prefill_s(1, 100, 5000) + sent_s)
    assert result.ttlt_s[0] == pytest.approx(result.alone_s[0] + sent_s)


def test_decoding_requests_do_not_wait_for_a_prefill() -> None:
    requests = [request(0.0, 10, 300), request(1.0, 400, 2), request(2.0, 400, 2)]
    assert served("fcfs", requests).longest_gap_s.max() < STEP_TIME.prefill_s(1, 400, 0)


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first", "sage", "fcfs-fill"])
def test_no_request_is_lost_though_memory_runs_out(policy: str) -> None:
    engine = replace(MANY_SLOTS, reserved_decode_tokens=8)
    result = served(policy, mixed(150, 12.0, 3), engine)
    assert result.num_retractions.sum() + result.num_preemptions.sum() > 0
    assert result.moved_tokens > 0
    assert result.prefill_tokens == result.input_tokens.sum()  # nothing is computed twice


def test_sglang_reserves_decode_tokens_and_we_headroom() -> None:
    requests = [request(0.0, 16, 30, 40) for _ in range(20)]
    much, little, ours = (
        float(np.max(served(policy, requests, replace(MANY_SLOTS, **kept)).ttft_s))
        for policy, kept in (
            ("fcfs", {"reserved_decode_tokens": 400}),
            ("fcfs", {"reserved_decode_tokens": 8}),
            ("fcfs-fill", {"reserved_decode_tokens": 400}),
        )
    )
    assert ours == pytest.approx(little)
    assert much > 2 * little


def test_room_goes_to_the_shortest_predicted() -> None:
    # The first one is not preempted; there is room for one other at a time.
    requests = [
        request(0.1 * i, 1000, length, distribution=known(length))
        for i, length in enumerate((300, 300, 5, 50))
    ]
    result = served("ssjf", requests, options=STAY)
    assert [*np.argsort(result.arrival_s + result.ttft_s)] == [0, 2, 3, 1]


@pytest.mark.parametrize("name", ["total_requests", "gorouting"])
def test_pairs_of_many_engines_serve_as_many_times_the_load(name: str) -> None:
    alone = served("sage", mixed(100, 3.0, 4))
    four = served("sage", mixed(400, 12.0, 4), num_nodes=4, router=router_named(name))
    assert float(np.mean(four.ttlt_s)) < 1.2 * float(np.mean(alone.ttlt_s))
