"""A share of the work for some, and no more."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sage_sched.job import Job
from sage_sched.urgency.credit import Credit
from tests.sage_sched.strategies import IDLE

POOL = 1000


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), share=st.sampled_from([0.0, 0.1, 0.5]))
def test_what_is_granted_is_a_share_of_the_work_and_a_pool_and_the_errors_of_forecasts(
    seed: int, share: float
) -> None:
    script = random.Random(seed)
    credit, granted, served_tokens, beyond = Credit(share, POOL), dict[Job, int](), 0, 0.0
    running: list[Job] = []
    for arrival in range(200):
        credit.look(replace(IDLE, served_tokens=served_tokens, running=running))
        job = Job(arrival, 10, 10, None, 0)
        foreseen = script.randint(1, 400)
        if credit.grant(job, foreseen):
            assert credit.has_grant(job)
            granted[job] = foreseen
            running.append(job)
        taken = sum(max(job.served_tokens, foreseen) for job, foreseen in granted.items())
        assert taken <= POOL + share * served_tokens + beyond + 1e-6
        for one in running:
            one.served_tokens += script.randint(0, 60)
        beyond = sum(max(0, job.served_tokens - foreseen) for job, foreseen in granted.items())
        running = [one for one in running if script.random() < 0.9]
        served_tokens += script.randint(0, 300) + 60 * len(running)
    assert granted


def test_what_a_grant_takes_beyond_its_forecast_is_charged_to_those_that_come_later() -> None:
    credit, job, later = Credit(0.5, POOL), Job(0, 10, 10, None, 0), Job(1, 10, 10, None, 0)
    assert credit.grant(job, 900)
    job.served_tokens = 1100
    credit.look(replace(IDLE, served_tokens=400, running=[job]))
    assert not credit.grant(later, 101)  # 1000 - 900 + 200 - 200
    assert credit.grant(later, 100)
    assert not credit.has_grant(Job(2, 10, 10, None, 0))


def test_a_grant_ends_with_its_job() -> None:
    credit, job = Credit(0.5, POOL), Job(0, 10, 10, None, 0)
    assert credit.grant(job, 10)
    credit.look(replace(IDLE, waiting=[job]))
    assert credit.has_grant(job)
    credit.look(IDLE)
    assert not credit.has_grant(job)
