"""Admission with forecasts that are wrong, all by the same factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from sage_sched.config import AdmissionConfig, SageConfig
from tests.bench.simulator.traffic import STEP_TIME, mixed

# The pool binds, and caps are far above what answers take.
ENGINE = Engine(step_time=STEP_TIME, kv_pool_tokens=16384, max_running_requests=256, page_size=16)
CAP = 4000
STOCK = SageConfig(admission=AdmissionConfig(0.0))


def foreseen(wrong_by: float) -> list[SimRequest]:
    return [
        replace(request, distribution=request.distribution.scaled(wrong_by), max_new_tokens=CAP)
        for request in mixed(600, rate=12.0, seed=5)
        if request.distribution is not None
    ]


def served(requests: Sequence[SimRequest], config: SageConfig | None = None) -> Result:
    return simulate(ENGINE, "sage-order", config or SageConfig(), requests)


@pytest.mark.parametrize("wrong_by", [0.2, 5.0])
def test_wrong_forecasts_cost_admission_little(wrong_by: float) -> None:
    right, wrong = served(foreseen(1.0)), served(foreseen(wrong_by))
    stock = served(foreseen(wrong_by), STOCK)
    assert right.ttlt_s.mean() < 0.9 * stock.ttlt_s.mean()
    assert wrong.ttlt_s.mean() < 1.1 * right.ttlt_s.mean()
    assert wrong.num_retractions.sum() < 0.05 * len(wrong.ttlt_s)
