"""Overload protection in the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, mixed, request

DEADLINES = {"max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}
ON = SageConfig.parse({"overload": {"enabled": True, **DEADLINES}})


def served(policy: str, config: SageConfig, requests: Sequence[SimRequest]) -> Result:
    return simulate(SMALL, policy, config, requests, CHECKED)


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_more_requests_are_good_beyond_capacity(policy: str) -> None:
    requests = mixed(600, 9.0, 1)
    plain, protected = (served(policy, config, requests) for config in (CONFIG, ON))
    assert plain.num_refused == 0

    def num_good(result: Result) -> float:
        return result.good_share(1.0, 0.1) * len(result.ttlt_s)

    assert 0 < protected.num_refused < 500
    assert protected.good_share(1.0, 0.1) > plain.good_share(1.0, 0.1) + 0.1
    assert num_good(protected) > num_good(plain)


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_at_low_load_nothing_is_refused(policy: str) -> None:
    assert served(policy, ON, mixed(300, 0.7, 2)).num_refused == 0


def test_a_burst_of_two_thousand_leaves_a_server_that_goes_on() -> None:
    burst = [replace(each, arrival_s=1.0) for each in mixed(2000, 1.0, 3)]
    later = [replace(each, arrival_s=each.arrival_s + 2000.0) for each in mixed(100, 1.0, 4)]
    result = simulate(SMALL, "sage", ON, [*burst, *later], Options())
    assert 1000 < result.num_refused < 2000
    assert (result.arrival_s >= 2000.0).sum() == 100  # none of those that came later


def test_without_predictions_nothing_is_refused() -> None:
    requests = [replace(each, distribution=None) for each in mixed(200, 20.0, 5)]
    assert served("fcfs-fill", ON, requests).num_refused == 0


def test_the_first_request_to_an_idle_server_is_never_refused() -> None:
    config = SageConfig.parse({"overload": {"enabled": True, "max_ttft_ms": 0.001}})
    requests = [request(10.0 * number, 20, 5) for number in range(5)]
    assert served("sage", config, requests).num_refused == 0
    assert math.isfinite(served("sage", config, requests).duration_s)
