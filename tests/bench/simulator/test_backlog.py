"""The predicted time of a server's backlog, against the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulator.presets import H800_QWEN3_32B
from bench.simulator.run import simulate
from sage_sched.backlog import backlog_s, expected_left_tokens
from sage_sched.distribution import UNKNOWN
from sage_sched.job import Job
from tests.bench.simulator.traffic import CONFIG, known, request

SERVER = H800_QWEN3_32B.server_facts()


@pytest.mark.parametrize("number", [1, 20, 1000])
@pytest.mark.parametrize("mean_tokens", [60.0, 300.0])
@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_a_backlog_ends_with_nine_in_ten(number: int, mean_tokens: float, policy: str) -> None:
    """All requests come at once. The forecast is the distribution that lengths are drawn from."""
    rng = np.random.default_rng(number)
    drawn = np.clip(rng.lognormal(np.log(mean_tokens), 0.8, 4000), 1, 2048).astype(int).tolist()
    forecast = known(*drawn[:1000])
    inputs = rng.integers(20, 600, number).tolist()
    of = zip(inputs, drawn[1000:], strict=False)
    requests = [request(0.0, *lengths, 2048, distribution=forecast) for lengths in of]
    jobs = [Job(i, inputs[i], 2048, forecast, 0) for i in range(number)]
    ttlt_s = simulate(H800_QWEN3_32B, policy, CONFIG, requests).ttlt_s
    ratio = backlog_s(jobs, 0.7, SERVER) / np.quantile(ttlt_s, 0.9)
    # Few requests end one by one, and the batch shrinks.
    assert (0.8 if number >= 200 else 0.4) < ratio < 1.4


@pytest.mark.parametrize(
    ("job", "grown", "left", "takes_s"),
    [
        (Job(0, 100, 1000, known(*[200] * 9), 0), 150, 50, 2.052255),
        (Job(0, 100, 1000, known(*[200] * 9), 0), 300, 300, 12.32706),  # longer than any sample
        (Job(0, 100, 1000, known(*[200] * 9), 0), 999, 1, 0.041180236),
        (Job(0, 5000, 1000, UNKNOWN, 0, prefilled_tokens=2000), 0, 300, 13.11638),
        (Job(0, 10, 1000, UNKNOWN, 0, has_fixed_length=True), 0, 1000, 41.12638),
    ],
)
def test_each_token_done_makes_it_less(job: Job, grown: int, left: int, takes_s: float) -> None:
    job.grow(grown)
    assert expected_left_tokens(job, 0.3) == pytest.approx(left)
    assert backlog_s([job], 0.3, SERVER) == pytest.approx(takes_s, rel=1e-6)
