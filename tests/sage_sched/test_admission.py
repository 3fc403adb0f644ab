from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.admission import Admission, shared_peak_tokens
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from tests.sage_sched.strategies import distributions

CLIP = 4096


def foreseen(quantile: float, one: Job) -> int | None:
    return Admission(quantile, CLIP).foreseen_tokens(one)


quantiles = st.floats(0.01, 1)


def job(distribution: LengthDistribution | None, cap: int, age: int = 0) -> Job:
    return Job(0, 10, cap, distribution, 0, generated_tokens=age)


@given(distributions(), quantiles, st.integers(1, 8000), st.data())
def test_what_is_to_come_is_something_and_within_the_cap(
    distribution: LengthDistribution, quantile: float, cap: int, data: st.DataObject
) -> None:
    age = data.draw(st.integers(0, cap - 1))
    left = foreseen(quantile, job(distribution, cap, age))
    assert left is not None
    assert 1 <= left <= cap - age


@given(distributions(), quantiles, quantiles, st.integers(0, 3000))
def test_a_larger_quantile_expects_no_less(
    distribution: LengthDistribution, one: float, other: float, age: int
) -> None:
    low, high = (foreseen(q, job(distribution, 5000, age)) for q in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low <= high


@given(distributions(), quantiles, st.lists(st.integers(0, 3000), max_size=10))
def test_it_does_not_matter_at_which_ages_one_has_asked_before(
    distribution: LengthDistribution, quantile: float, ages: list[int]
) -> None:
    # Ranks, and the simulator, do not look at the same moments.
    asked, admission = job(distribution, 5000), Admission(quantile, CLIP)
    for age in sorted(ages):
        asked.grow(age)
        admission.foreseen_tokens(asked)
    asked.grow(3000)
    assert admission.foreseen_tokens(asked) == admission.foreseen_tokens(
        job(distribution, 5000, 3000)
    )


@given(distributions(), quantiles, st.integers(0, 5000))
def test_it_is_the_quantile_of_what_survives_its_age(
    distribution: LengthDistribution, quantile: float, age: int
) -> None:
    age = age // 16 * 16
    surviving = distribution.with_tail(20_000).surviving(age)
    length = min(2 * age, 20_000) if surviving is None else surviving.quantile(quantile)
    assert foreseen(quantile, job(distribution, 20_000, age)) == max(length - age, 16)


def test_by_hand() -> None:
    known = LengthDistribution.from_samples([100] * 6 + [500] * 4, "history")
    assert foreseen(0.5, job(known, 1000)) == 100
    assert foreseen(0.5, job(known, 1000, 96)) == 16  # at least a interval
    assert foreseen(0.5, job(known, 1000, 160)) == 340  # it is one of the long ones
    assert foreseen(0.5, job(known, 300, 160)) == 140
    assert foreseen(0.5, job(known, 4000, 1008)) == 1008  # longer than foreseen
    assert foreseen(0.5, job(known, 1600, 1008)) == 592
    assert foreseen(0.5, job(None, 1000)) is None


running_requests = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=12)


def missing_at_the_peak(running: list[tuple[int, int]], page_size: int) -> int:
    """Step by step, if nobody joins."""

    def paged(num_tokens: int) -> int:
        return -(-num_tokens // page_size) * page_size

    needed = [
        sum(paged(held + step) for held, left in running if left >= step) for step in range(1, 61)
    ]
    now = sum(paged(held) for held, _ in running)
    return max(0, max(needed) - now) if running else 0


@given(running_requests, st.sampled_from((1, 2, 16)))
def test_what_is_set_aside_is_what_is_missing_at_the_peak(
    running: list[tuple[int, int]], page_size: int
) -> None:
    held_tokens = np.array([held for held, _ in running], dtype=np.int64)
    left_tokens = np.array([float(left) for _, left in running])
    shares = shared_peak_tokens(held_tokens, left_tokens, page_size)
    assert len(shares) == len(running)
    too_many = sum(shares) - missing_at_the_peak(running, page_size)
    at_most = 0 if page_size == 1 else len(running) * page_size
    assert -1e-6 < too_many < at_most + 1e-6
