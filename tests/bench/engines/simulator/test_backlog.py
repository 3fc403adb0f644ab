"""What a server's backlog is said to take, against what it takes in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from bench.engines.simulator.presets import H800_QWEN3_32B
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.routing.backlog import backlog_s, expected_left_tokens
from sage_sched.steps import ServerFacts

SERVER = ServerFacts(
    H800_QWEN3_32B.kv_pool_tokens,
    H800_QWEN3_32B.max_running_requests,
    H800_QWEN3_32B.step_time,
    H800_QWEN3_32B.swap_token_s,
)


def crowd(number: int, mean_tokens: float) -> tuple[list[SimRequest], list[Job]]:
    """All there at once; the forecast is the distribution that the lengths are drawn from."""
    rng = np.random.default_rng(number)
    drawn = np.clip(rng.lognormal(np.log(mean_tokens), 0.8, 4000), 1, 2048).astype(int)
    known = LengthDistribution.from_samples(drawn[:1000].tolist(), "history")
    inputs = rng.integers(20, 600, number).tolist()
    requests = [
        SimRequest(0.0, inputs[i], int(drawn[1000 + i]), 2048, known, "") for i in range(number)
    ]
    jobs = [Job(i, inputs[i], 2048, known, 0) for i in range(number)]
    return requests, jobs


@pytest.mark.parametrize("number", [1, 20, 200, 1000])
@pytest.mark.parametrize("mean_tokens", [60.0, 300.0])
@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_it_is_when_nine_in_ten_are_done(number: int, mean_tokens: float, policy: str) -> None:
    requests, jobs = crowd(number, mean_tokens)
    ttlt_s = simulate(H800_QWEN3_32B, policy, SageConfig(), requests).ttlt_s
    ratio = backlog_s(jobs, 0.7, SERVER) / np.quantile(ttlt_s, 0.9)
    # A few that start together end one by one, the batch ever smaller.
    assert (0.8 if number >= 200 else 0.4) < ratio < 1.4


def test_nothing_to_do_takes_no_time_and_each_token_done_makes_it_less() -> None:
    assert backlog_s([], 0.7, SERVER) == 0.0
    job = Job(0, 100, 1000, LengthDistribution.from_samples([200] * 9, "history"), 0)
    before = backlog_s([job], 0.7, SERVER)
    job.grow(150)
    assert 0 < backlog_s([job], 0.7, SERVER) < before / 3
    assert expected_left_tokens(job, 0.7) == 50
    job.grow(300)  # longer than any that was alike
    assert expected_left_tokens(job, 0.7) == 300
    job.grow(999)
    assert expected_left_tokens(job, 0.7) == 1


def test_where_nothing_is_known_it_is_the_caps_share_and_a_fixed_length_is_known() -> None:
    assert expected_left_tokens(Job(0, 10, 1000, None, 0), 0.3) == pytest.approx(300)
    assert expected_left_tokens(Job(0, 10, 1000, None, 0, has_fixed_length=True), 0.3) == 1000
