"""What a probe says, played back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.simulator.run import simulate
from bench.simulator.scores import Playback, Scores
from sage_sched.config import SageConfig
from sage_sched.job import Job
from sage_sched.policies.sage import SageParameters
from sage_sched.probe import Reading
from sage_sched.registry import policy_named
from tests.bench.simulator.traffic import SMALL, known, request

# Up to 100 tokens are left, or more.
READING = Reading(np.array([0, 100, 1 << 20]), np.array([0]), np.log([[0.5, 0.5]]))
SHORT_OR_LONG = known(20, 20, 20, 1000)


def scores(share_short: float, num_ages: int = 8) -> Scores:
    """The same at each of these ages."""
    row = np.log([share_short, 1 - share_short])
    return Scores(np.arange(num_ages), np.tile(row, (num_ages, 1)), READING)


@pytest.mark.parametrize(("name", "last_age"), [("sage", None), ("sage+", 2)])
def test_each_score_is_told_once_to_a_policy_that_takes_them(
    name: str, last_age: int | None
) -> None:
    policy = policy_named(name, {}, SMALL.server_facts())
    job = Job(0, 16, 1024, SHORT_OR_LONG, 0)
    policy.on_arrival(job)
    job.generated_tokens = 4  # age 3 is not due
    playback, said = Playback(policy), [(job, scores(0.01))]
    playback.tell(said)
    assert (job.refined and job.refined.age_tokens) == last_age
    revision = job.revision
    playback.tell(said)
    assert job.revision == revision


def test_who_is_seen_to_be_long_yields_sooner() -> None:
    engine = replace(SMALL, max_running_requests=1, swap_token_s=0.05)
    config = SageConfig(policy={"sage": SageParameters(regret=math.inf)})
    short = request(0.1, 16, 150, 1024, distribution=known(150))
    told, blind = (
        simulate(
            engine, "sage+", config,
            [request(0.0, 16, 1000, 1024, distribution=SHORT_OR_LONG, scores=said), short],
        ).ttlt_s[1]
        for said in (scores(0.001, 1000), None)
    )  # fmt: skip
    assert told < blind - 0.1
