"""What a server tells routers of its queue."""

from __future__ import annotations

import pytest

from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.routing import answer_tokens


def job(lengths: list[int] | None, age_tokens: int = 0, cap: int = 1000) -> Job:
    known = None if lengths is None else LengthDistribution.from_samples(lengths, "history")
    made = Job(0, 10, cap, known, 0)
    made.grow(age_tokens)
    return made


@pytest.mark.parametrize(
    ("waiting", "tokens"),
    [
        ([], 0),
        ([job([10, 30])], 20),
        ([job([10, 30]), job([500])], 520),
        ([job(None)], 0),
        ([job([500], cap=100)], 100),
        # One that has begun has the rest before it, and one that nobody foresaw as much again.
        ([job([10, 30], age_tokens=12)], 18),
        ([job([10, 30], age_tokens=40)], 40),
        ([job([10, 30], age_tokens=40, cap=50)], 10),
    ],
)
def test_the_answers_of_those_that_wait_count(waiting: list[Job], tokens: int) -> None:
    assert answer_tokens(waiting) == tokens
