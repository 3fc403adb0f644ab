"""Each part of ProServe, by the difference that its absence makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.policies.proserve_parts import PARTS
from sage_sched.order import serving_order
from sage_sched.slo import Proserve, ProserveParameters
from tests.sage_sched.slo.test_policy import MIXED, SOON, job
from tests.sage_sched.strategies import waiting

LATER = replace(SOON, ttft_slo_ms=1500.0)


@pytest.mark.parametrize(
    ("name", "under_load", "idle"),
    [
        ("proserve", [1, 0], [0, 1]),
        ("proserve-deadline", [0, 1], [0, 1]),
        ("proserve-density", [1, 0], [1, 0]),
    ],
)
def test_urgent_requests_go_by_density(name: str, under_load: list[int], idle: list[int]) -> None:
    for input_tokens, expected in ((900, under_load), (9, idle)):
        policy = PARTS.get(name, Proserve)(ProserveParameters(), MIXED)
        # The deadline of the first is earlier, and the second is shorter.
        jobs = [job(0, input_tokens=input_tokens), job(1, LATER, input_tokens=input_tokens - 5)]
        for one in jobs:
            assert policy.on_arrival(one)
        view = waiting(*jobs)
        policy.on_pass(view)
        assert serving_order(policy, view) == expected


def test_unaware_of_latency_it_bounds_no_batch() -> None:
    running, late = job(0, age=1), job(1, input_tokens=5000)
    for name, is_bounded in (("proserve", True), ("proserve-unaware", False)):
        policy = PARTS.get(name, Proserve)(ProserveParameters(), MIXED)
        for one in (running, late):
            assert policy.on_arrival(one)
        view = replace(waiting(late), running=[running], pass_tokens=8192, now_s=0.9)
        policy.on_pass(view)
        assert (policy.budget(view) is not None) == is_bounded
