"""An engine that prefills and one that decodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.engines.simulator.apart import simulate_apart
from bench.engines.simulator.state import Options
from bench.policies.routers import router_named
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from tests.bench.engines.simulator.traffic import MANY_SLOTS, SMALL, STEP_TIME, mixed, request

CONFIG = SageConfig()


def test_alone_a_request_is_prefilled_sent_and_decoded() -> None:
    result = simulate_apart(SMALL, "fcfs", CONFIG, [request(1.0, 100, 30)])
    sent_s = 100 * SMALL.swap_token_s
    assert result.ttft_s[0] == pytest.approx(STEP_TIME.prefill_s(1, 100, 5000) + sent_s)
    assert result.ttlt_s[0] == pytest.approx(result.alone_s[0] + sent_s)


def test_nobody_that_decodes_waits_for_a_prefill() -> None:
    requests = [request(0.0, 10, 300), request(1.0, 400, 2), request(2.0, 400, 2)]
    result = simulate_apart(SMALL, "fcfs", CONFIG, requests)
    assert result.longest_gap_s.max() < STEP_TIME.prefill_s(1, 400, 0)


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prefill-first", "sage", "fcfs-fill"])
def test_no_request_is_lost_though_memory_runs_out(policy: str) -> None:
    engine = replace(MANY_SLOTS, reserved_decode_tokens=8)
    result = simulate_apart(engine, policy, CONFIG, mixed(150, 12.0, 3))
    assert result.num_retractions.sum() + result.num_yields.sum() > 0
    assert result.moved_tokens > 0
    assert result.prefill_tokens == result.input_tokens.sum()  # nothing is computed twice


def test_sglang_keeps_what_it_is_told_to_free_for_each_and_we_what_steps_need() -> None:
    requests = [request(0.0, 16, 30, 40) for _ in range(20)]
    most = {}
    for policy, reserved_tokens in (("fcfs", 400), ("fcfs", 8), ("fcfs-fill", 400)):
        engine = replace(MANY_SLOTS, reserved_decode_tokens=reserved_tokens)
        result = simulate_apart(engine, policy, CONFIG, requests)
        most[policy, reserved_tokens] = float(np.max(result.ttft_s))
    assert most["fcfs-fill", 400] == pytest.approx(most["fcfs", 8])
    assert most["fcfs", 400] > 2 * most["fcfs", 8]


def test_room_goes_to_the_shortest_predicted() -> None:
    def known(arrival_s: float, length: int) -> object:
        lengths = LengthDistribution.from_samples([length] * 9, "history")
        return replace(request(arrival_s, 1000, length), distribution=lengths)

    # Of the first one nobody makes room; of the others there is room for one at a time.
    requests = [known(0.0, 300), known(0.1, 300), known(0.2, 5), known(0.3, 50)]
    result = simulate_apart(SMALL, "ssjf", CONFIG, requests, Options(preempt=False))  # type: ignore[arg-type]
    first_s = result.arrival_s + result.ttft_s
    assert [*np.argsort(first_s)] == [0, 2, 3, 1]


@pytest.mark.parametrize("name", ["total_requests", "predicted-cost", "gorouting"])
def test_pairs_of_many_engines_serve_as_many_times_the_load(name: str) -> None:
    alone = simulate_apart(SMALL, "sage", CONFIG, mixed(100, 3.0, 4))
    four = simulate_apart(
        SMALL, "sage", CONFIG, mixed(400, 12.0, 4), num_nodes=4, router=router_named(name)
    )
    assert float(np.mean(four.ttlt_s)) < 1.2 * float(np.mean(alone.ttlt_s))
