"""Whatever a setting, a hint or a step time may be, policies go on: a policy that raises or divides
by nothing would leave its passes to arrival, and at worst end its scheduler."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest

from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from sage_sched.config import SageConfig
from sage_sched.fields import ConfigError
from sage_sched.job import (
    LEAST_SLO_MS,
    LEAST_WEIGHT,
    MOST_SLO_MS,
    MOST_WEIGHT,
    Hints,
)
from sage_sched.registry import policy_names, policy_type, section_of
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import SMALL, STEP_TIME, mixed

POLICIES = sorted({section_of(name) for name in policy_names()})
NUMBERS: tuple[Any, ...] = (
    0, -0.0, 5e-324, 1e-310, 1e-9, 1e-6, 1e-3, 0.5, 1, 1e3, 1e9, 1e17, 1e308, math.inf, -math.inf,
    math.nan, -1, 2**31, 2**63, 10**400,
)  # fmt: skip
WEIGHTS = (LEAST_WEIGHT, 1.0, MOST_WEIGHT)
SLOS_MS = (LEAST_SLO_MS, 50.0, MOST_SLO_MS, None)
PROMISED = [
    Hints(weight=weight, first_token_weight=first, ttft_slo_ms=ttft, tpot_slo_ms=tpot, urgency=3)
    for weight in WEIGHTS
    for first in WEIGHTS
    for ttft in SLOS_MS
    for tpot in SLOS_MS
]


def traffic(num_requests: int = 30) -> list[SimRequest]:
    """Some are promised something, more than fit at once."""
    requests = mixed(num_requests, 200.0, 1)
    some = [Hints(urgency=1 + n % 5) if n % 2 else PROMISED[17 * n % 144] for n in range(100)]
    return [replace(each, hints=hints) for each, hints in zip(requests, some, strict=False)]


def set_to(section: str, field: str, value: Any) -> SageConfig | None:
    """None if that is refused."""
    try:
        return SageConfig.parse({"policy": {section: {field: value}}})
    except ConfigError:
        return None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("error")
def test_what_a_policy_may_be_set_to_it_can_go_by(policy: str) -> None:
    requests, num_accepted = traffic(), 0
    for field in dataclasses.fields(policy_type(policy).Parameters):
        for value in NUMBERS if field.type in ("float", "int") else ():
            if (config := set_to(policy, field.name, value)) is not None:
                num_accepted += 1
                simulate(SMALL, policy, config, requests)
    assert num_accepted or not dataclasses.fields(policy_type(policy).Parameters)


@pytest.mark.parametrize("policy", ["proserve", "proserve-expected", "urgency", "sage"])
@pytest.mark.filterwarnings("error")
def test_every_promise_that_can_be_made_can_be_gone_by(policy: str) -> None:
    requests = [
        replace(each, hints=hints)
        for each, hints in zip(mixed(len(PROMISED), 200.0, 2), PROMISED, strict=True)
    ]
    simulate(SMALL, policy, SageConfig(), requests)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.filterwarnings("error")
def test_steps_that_take_as_long_whatever_is_in_them_can_be_gone_by(policy: str) -> None:
    flat = StepTime(0.004, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0)
    slopes = StepTime(0.0, 0.0, 1e-4, 0.0, 0.0, 0.0, 1e-7)
    for step_time in (flat, slopes, StepTime(*(1e-3 * s for s in dataclasses.astuple(STEP_TIME)))):
        simulate(replace(SMALL, step_time=step_time), policy, SageConfig(), traffic())
