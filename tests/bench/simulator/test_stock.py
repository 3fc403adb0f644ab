"""SGLang's own policies in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.simulator.run import simulate
from bench.simulator.stock import ShortestPrefillPolicy
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, mixed, request


@pytest.mark.parametrize(
    ("policy", "inputs", "expected"),
    [
        ("fcfs", [300, 20, 100], [0, 1, 2]),
        ("lpm", [300, 20, 100], [0, 1, 2]),
        ("shortest-prefill-first", [300, 20, 100], [1, 2, 0]),
        ("hrrn", [300, 20, 100], [1, 2, 0]),
        ("hrrn", [300, 20] * 70, [*range(140)]),  # a long queue is left as it lies
    ],
)
def test_orders(policy: str, inputs: list[int], expected: list[int]) -> None:
    """In the only slot, one after the other, requests that come while another runs."""
    requests = [request(0.1 + 0.001 * i, tokens, 2) for i, tokens in enumerate(inputs)]
    one_slot = replace(SMALL, max_running_requests=1)
    result = simulate(one_slot, policy, CONFIG, [request(0.0, 10, 100), *requests], CHECKED)
    order = np.argsort(result.arrival_s + result.ttft_s)[1:] - 1
    assert order.tolist()[:10] == expected[:10]


def test_a_long_prompt_leaves_room_in_its_chunks_for_shorter_ones() -> None:
    policy = ShortestPrefillPolicy()
    assert policy.chunk_limit(1000, 512, 16, [20, 100, 2000]) == 512 - 32 - 112
    assert policy.chunk_limit(50, 512, 16, [60]) is None


def test_fcfs_fill_admits_more_in_the_same_order() -> None:
    requests = mixed(200, 8.0, 11)
    stock, ours = (simulate(SMALL, name, CONFIG, requests) for name in ("fcfs", "fcfs-fill"))
    assert ours.ttlt_s.mean() < 0.9 * stock.ttlt_s.mean()
    assert (np.diff(ours.arrival_s + ours.ttft_s) > -1e-9).all()
    assert ours.num_retractions.sum() == 0
