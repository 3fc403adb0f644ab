"""Many engines behind a router, and engines that prefill and engines that decode."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench.simulator.apart import simulate_apart
from bench.simulator.cluster import simulate_cluster
from bench.simulator.run import simulate
from bench.simulator.state import Options
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, STAY, STEP_TIME, mixed, request

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


def test_apart_prefill_transfer_and_decode_follow_one_another_beside_other_prefills() -> None:
    result = apart("fcfs", CONFIG, [request(1.0, 100, 30)])
    sent_s = 100 * SMALL.swap_token_s
    assert result.ttft_s[0] == pytest.approx(STEP_TIME.prefill_s(1, 100, 5000) + sent_s)
    assert result.ttlt_s[0] == pytest.approx(result.alone_s[0] + sent_s)
    requests = [request(0.0, 10, 300), request(1.0, 400, 2), request(2.0, 400, 2)]
    prefill_s = STEP_TIME.prefill_s(1, 400, 0)
    assert apart("fcfs", CONFIG, requests).longest_gap_s.max() < prefill_s
