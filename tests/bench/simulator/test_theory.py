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
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.plan import NextPlan
from sage_sched.policy import Policy, Traits
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
PURE = SrptOracleParameters(preempt_margin=0.0)  # no hysteresis


@pytest.fixture(autouse=True)
def _without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests yield as often as the policy wants, by indices that are nearly always new."""
    monkeypatch.setattr(Policy, "traits", Traits(max_preemptions=1_000_000))
    monkeypatch.setattr(Policy, "on_pass", lambda self, view, queue: NextPlan(interval_tokens=10))


def traffic(num_requests: int, load: float, seed: int) -> tuple[float, list[SimRequest]]:
    """Return the rate per step, and requests that arrive at it, predicted by the true
    distribution."""
    rng = np.random.default_rng(seed)
    rate = load / float(STEPS @ WEIGHTS)
    arrivals_s = np.cumsum(rng.exponential(TOKEN_S / rate, num_requests)).tolist()
    lengths = (rng.choice(STEPS, num_requests, p=WEIGHTS) + 1).tolist()
    known = LengthDistribution(STEPS + 1, WEIGHTS, 1e6, "prior")
    cap = int(STEPS[-1]) + 1
    of = zip(arrivals_s, lengths, strict=True)
    return rate, [SimRequest(at_s, 1, length, cap, known, "") for at_s, length in of]


def mean_and_error(result: Result) -> tuple[float, float]:
    """Return the mean response in steps, and its standard error by the means of 20 stretches."""
    means = [part.mean() for part in np.array_split(result.ttlt_s / TOKEN_S, 20)]
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(len(means)))


def surely(request: SimRequest) -> SimRequest:
    """Return the request with its own length as the prediction."""
    said = LengthDistribution.from_samples([request.output_tokens], "prior")
    return replace(request, distribution=said)


# The number of requests, and their seed.
DRAWN = {
    "fcfs": (10_000, 1), "ssjf": (10_000, 3), "srpt-oracle": (5_000, 2), "trail-prompt": (2_500, 3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "load", "limit"),
    [
        *(("fcfs", load, None) for load in (0.5, 0.8)),
        ("ssjf", 0.8, 0.0),
        *(("srpt-oracle", load, 1.0) for load in (0.5, 0.8)),
        *(("trail-prompt", 0.8, limit) for limit in (0.3, 0.8)),
    ],
)
def test_the_mean_response_is_the_closed_form(
    policy: str, load: float, limit: float | None
) -> None:
    """Pollaczek and Khinchine, Cobham, Schrage and Miller, and TRAIL with exact predictions."""
    number, seed = DRAWN[policy]
    rate, requests = traffic(number, load, seed)
    if policy in ("ssjf", "trail-prompt"):
        requests = [*map(surely, requests)]
    parameters = {"srpt-oracle": PURE, "trail-prompt": TrailParameters(limit or 1.0)}
    result = simulate(ONE_SLOT, policy, SageConfig(policy=parameters), requests)
    mean, error = mean_and_error(result)
    wait = rate * float(STEPS**2 @ WEIGHTS) / (2 * (1 - load))
    expected = float(STEPS @ WEIGHTS) + wait if limit is None else _srpt_response(rate, limit)
    # If requests yield, an arrival is seen at the end of a step, half a step late in the mean.
    assert mean == pytest.approx(expected, abs=4 * error + bool(limit))
    assert error < 0.1 * mean or policy == "trail-prompt"
    # The check can fail: without TRAIL's limit the value would differ.
    assert mean > _srpt_response(rate) + error or limit != 0.3


def _srpt_response(rate: float, limit: float = 1.0) -> float:
    """Schrage and Miller 1966, for a distribution of atoms, ties by arrival.

    With preemption up to age limit * size, it is TRAIL's Lemma 1 for exact predictions. If limit is
    0, without preemption, it is Cobham 1954. As printed, the lemma leaves out two kinds of larger
    jobs in service: jobs with no more than size left, and jobs past their own limit with more left.
    max(size, (1 - limit) * theirs) is ahead (SOAP, theorem 5.5, with the rank of the lemma's
    proof).
    """
    response = 0.0
    for size, weight in zip(STEPS, WEIGHTS, strict=True):
        up_to, below = size >= STEPS, size > STEPS
        ahead = np.maximum(size, (1 - limit) * STEPS[~up_to])
        second = float(STEPS[up_to] ** 2 @ WEIGHTS[up_to]) + float(ahead**2 @ WEIGHTS[~up_to])
        load_up_to = rate * float(STEPS[up_to] @ WEIGHTS[up_to])
        load_below = rate * float(STEPS[below] @ WEIGHTS[below])
        wait = rate / 2 * second / ((1 - load_up_to) * (1 - load_below))
        # While less than (1 - limit) * size is left of it, no other job gets ahead.
        alone = (1 - limit) * size
        residence = alone
        for start, end in pairwise([0, *STEPS[up_to]]):
            smaller = start >= STEPS
            share = 1 - rate * float(STEPS[smaller] @ WEIGHTS[smaller])
            residence += max(0.0, end - max(start, alone)) / share
        response += weight * (wait + residence)
    return response
