from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_sched.admission import Admission
from sage_sched.correction import Correction
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.refined import Refined

CAP = 1 << 20
quantiles = st.sampled_from((0.3, 0.5, 0.7, 0.9))


def lengths(num: int, wrong_by: float, seed: int) -> list[tuple[int, int]]:
    """Medians as they are foreseen, and the answers: that much longer than foreseen."""
    rng = np.random.default_rng(seed)
    foreseen = rng.integers(50, 500, num)
    answers = np.maximum(1, foreseen * wrong_by * rng.lognormal(0, 0.7, num)).astype(int)
    return [*zip(foreseen.tolist(), answers.tolist(), strict=True)]


@given(quantiles, st.floats(0.15, 7), st.integers(0, 1000))
@settings(max_examples=20)
def test_it_comes_to_rest_where_the_right_share_is_longer(
    quantile: float, wrong_by: float, seed: int
) -> None:
    correction = Correction(quantile)
    longer, tokens = 0.0, 0.0
    for number, (foreseen, answer) in enumerate(lengths(3000, wrong_by, seed)):
        if number >= 500:
            longer += foreseen * (answer > foreseen * correction.exact_factor)
            tokens += foreseen
        correction.ended(foreseen, answer, CAP)
    assert longer / tokens == pytest.approx(1 - quantile, abs=0.05)


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), max_size=60))
def test_ranks_that_see_the_same_answers_correct_alike(seen: list[tuple[int, int]]) -> None:
    ranks = [Correction(0.5), Correction(0.5)]
    for foreseen, answer in seen:
        for rank in ranks:
            rank.ended(foreseen, answer, 4000)
        assert ranks[0].factor == ranks[1].factor
        assert 1 / 17 < ranks[0].factor < 17


def test_chance_does_not_reach_what_admission_goes_by() -> None:
    correction = Correction(0.5)
    factors = []
    for foreseen, answer in lengths(2000, 1.0, seed=1):
        correction.ended(foreseen, answer, CAP)
        factors.append(correction.factor)
    assert np.mean(np.array(factors) == 1.0) > 0.7
    assert max(map(abs, map(math.log, factors))) < 0.5


def test_the_many_short_ones_do_not_outvote_the_long_ones_that_fill_the_memory() -> None:
    correction = Correction(0.5)
    for _ in range(100):
        for foreseen, answer in ((20, 40), (20, 40), (20, 40), (1000, 500)):
            correction.ended(foreseen, answer, CAP)
    assert correction.factor < 1


def test_what_ends_at_its_cap_was_longer_or_says_nothing() -> None:
    correction = Correction(0.5)
    correction.ended(100, 400, cap_tokens=400)
    assert correction.exact_factor > 1
    before = correction.stats()
    correction.ended(1000, 400, cap_tokens=400)
    assert correction.stats() == before


def job(foreseen: list[int], cap: int = 4000) -> Job:
    return Job(0, 10, cap, LengthDistribution.from_samples(foreseen, "history"), 0)


def told(admission: Admission, foreseen: int, answer: int, num: int) -> None:
    for _ in range(num):
        ended = job([foreseen] * 9)
        ended.grow(answer)
        admission.ended(ended)


def test_admission_counts_on_the_corrected_length_at_every_age() -> None:
    admission = Admission(0.5, 4096)
    told(admission, foreseen=500, answer=100, num=200)
    factor = admission.correction.factor
    assert 1 / 6 < factor < 1 / 4
    waiting = job([500] * 9)
    assert admission.asked_tokens(waiting) == math.ceil(500 * factor)
    # The one that lives on is one of the long ones, by the corrected lengths.
    either = job([500] * 6 + [2500] * 4)
    assert admission.foreseen_tokens(either) == math.ceil(500 * factor)
    either.grow(160)
    assert admission.foreseen_tokens(either) == math.ceil(2500 * factor) - 160


def test_what_was_asked_before_a_correction_is_asked_anew() -> None:
    admission, running = Admission(0.5, 4096), job([500] * 9)
    running.grow(3)
    assert admission.foreseen_tokens(running) == 497
    told(admission, foreseen=500, answer=100, num=200)
    assert admission.foreseen_tokens(running) == (math.ceil(500 * admission.correction.factor) - 3)


def test_what_was_seen_of_an_answer_is_taken_as_it_is() -> None:
    admission, running = Admission(0.5, 4096), job([500] * 9)
    told(admission, foreseen=500, answer=100, num=200)
    running.grow(3)
    running.revise(Refined(3, np.array([100.0, 200.0, 300.0]), np.array([0.2, 0.6, 0.2])))
    assert admission.foreseen_tokens(running) == 197
    running.grow(210)
    assert admission.foreseen_tokens(running) == 90
    # Answers are held against what their prompts foretold.
    before = admission.correction.exact_factor
    admission.ended(running)
    assert admission.correction.exact_factor != before


def test_fixed_lengths_do_not_count() -> None:
    admission = Admission(0.5, 4096)
    fixed, unknown = job([500] * 9), job([500] * 9)
    fixed.has_fixed_length, unknown.distribution = True, None
    for one in (fixed, unknown):
        one.grow(20)
        admission.ended(one)
    assert admission.correction.num_answers == 0


def test_sglangs_own_admission_is_left_alone() -> None:
    admission = Admission(0.0, 4096)
    told(admission, foreseen=500, answer=100, num=20)
    assert admission.correction.num_answers == 0
