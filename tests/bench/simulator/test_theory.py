"""The simulator against queueing theory: one slot, constant token time, no prefill: an M/G/1."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bench.policies.srpt_oracle import SrptOracleParameters
from bench.policies.trail import TrailParameters
from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.policy import Policy
from sage_sched.steps import StepTime

pytestmark = pytest.mark.slow

TOKEN_S = 0.001
# Service times in decode steps; the first token comes with the prefill, which takes no time.
STEPS = np.array([20, 60, 150, 400, 1000])
WEIGHTS = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
ONE_SLOT = Engine(
    step_time=StepTime(0.0, 0.0, 0.0, 0.0, TOKEN_S, 0.0, 0.0),
    kv_pool_tokens=1_000_000_000,  # so that the measured cost is the time alone
    max_running_requests=1,
)
PREEMPTIVE = Options(preempt=True)
# No hysteresis.
PURE = SageConfig(policy={"srpt-oracle": SrptOracleParameters(preempt_margin=0.0)})


@pytest.fixture(autouse=True)
def _without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests yield as often as they should, by indices that are nearly always new."""
    monkeypatch.setattr(Policy, "max_preemptions", 1_000_000)
    monkeypatch.setattr(Policy, "refresh_interval_tokens", 10)


def traffic(num_requests: int, load: float, seed: int) -> tuple[float, list[SimRequest]]:
    """The rate per step, and requests that arrive at it; all predict the true distribution."""
    rng = np.random.default_rng(seed)
    rate = load / float(STEPS @ WEIGHTS)
    arrivals_s = np.cumsum(rng.exponential(TOKEN_S / rate, num_requests)).tolist()
    lengths = (rng.choice(STEPS, num_requests, p=WEIGHTS) + 1).tolist()
    known = LengthDistribution(STEPS + 1, WEIGHTS, 1e6, "prior")
    cap = int(STEPS[-1]) + 1
    of = zip(arrivals_s, lengths, strict=True)
    return rate, [SimRequest(at_s, 1, length, cap, known, "") for at_s, length in of]


def mean_and_error(result: Result) -> tuple[float, float]:
    """Mean response in steps and its standard error, by the means of 20 stretches."""
    means = [part.mean() for part in np.array_split(result.ttlt_s / TOKEN_S, 20)]
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(len(means)))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_fcfs_is_pollaczek_khinchine(load: float) -> None:
    rate, requests = traffic(10_000, load, 1)
    mean, error = mean_and_error(simulate(ONE_SLOT, "fcfs", SageConfig(), requests))
    wait = rate * float(STEPS**2 @ WEIGHTS) / (2 * (1 - load))
    assert mean == pytest.approx(float(STEPS @ WEIGHTS) + wait, abs=4 * error)
    assert error < 0.1 * mean


def surely(request: SimRequest) -> SimRequest:
    """With its own length as the prediction."""
    said = LengthDistribution.from_samples([request.output_tokens], "prior")
    return replace(request, distribution=said)


def test_shortest_job_first_is_cobham() -> None:
    rate, requests = traffic(10_000, 0.8, 3)
    result = simulate(ONE_SLOT, "ssjf", PURE, [*map(surely, requests)])
    mean, error = mean_and_error(result)
    assert mean == pytest.approx(_srpt_response(rate, limit=0.0), abs=4 * error)
    assert error < 0.08 * mean


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_srpt_is_schrage_miller(load: float) -> None:
    rate, requests = traffic(5_000, load, 2)
    result = simulate(ONE_SLOT, "srpt-oracle", PURE, requests, PREEMPTIVE)
    mean, error = mean_and_error(result)
    # An arrival is seen at the end of a step, half a step late in the mean.
    assert mean == pytest.approx(_srpt_response(rate), abs=4 * error + 1.0)
    assert error < 0.08 * mean


@pytest.mark.parametrize("limit", [0.3, 0.8])
def test_trail_with_exact_predictions_is_its_closed_form(limit: float) -> None:
    rate, requests = traffic(2_500, 0.8, 3)
    exact = [*map(surely, requests)]
    config = SageConfig(policy={"trail-prompt": TrailParameters(limit)})
    mean, error = mean_and_error(simulate(ONE_SLOT, "trail-prompt", config, exact, PREEMPTIVE))
    assert mean == pytest.approx(_srpt_response(rate, limit), abs=4 * error + 1.0)
    # The check can fail: without the limit the value would be another.
    assert mean > _srpt_response(rate) + error or limit > 0.5


def _srpt_response(rate: float, limit: float = 1.0) -> float:
    """Schrage and Miller 1966, for a distribution of atoms, ties by arrival.

    With preemption up to age limit * size, TRAIL's Lemma 1 for exact predictions; without any, if
    limit is 0, Cobham 1954. As printed, the lemma leaves out the larger jobs that are found in
    service with no more than size left, and those that are past their own limit with more:
    max(size, (1 - limit) * theirs) is ahead (SOAP, theorem 5.5, with their rank as the lemma's
    proof has it).
    """
    response = 0.0
    for size, weight in zip(STEPS, WEIGHTS, strict=True):
        up_to, below = size >= STEPS, size > STEPS
        ahead = np.maximum(size, (1 - limit) * STEPS[~up_to])
        second = float(STEPS[up_to] ** 2 @ WEIGHTS[up_to]) + float(ahead**2 @ WEIGHTS[~up_to])
        load_up_to = rate * float(STEPS[up_to] @ WEIGHTS[up_to])
        load_below = rate * float(STEPS[below] @ WEIGHTS[below])
        wait = rate / 2 * second / ((1 - load_up_to) * (1 - load_below))
        # While less than (1 - limit) * size is left of it, no other gets ahead.
        alone = (1 - limit) * size
        residence = alone
        for start, end in pairwise([0, *STEPS[up_to]]):
            smaller = start >= STEPS
            share = 1 - rate * float(STEPS[smaller] @ WEIGHTS[smaller])
            residence += max(0.0, end - max(start, alone)) / share
        response += weight * (wait + residence)
    return response
