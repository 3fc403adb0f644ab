"""Bayes' rule over the length of an answer, and TRAIL's filter over what is left of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.policies.trail_filter import TrailFilter, filtered, moved_down
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.probe import Posterior, Reading, Refiner, is_due

EDGES = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1 << 20])
BANDS = np.array([0, 1, 16])
BASE = np.log(np.full((3, 11), 1 / 11))


def posterior(alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0) -> Posterior:
    return Posterior(Reading(EDGES, BANDS, BASE, alpha, np.array([beta]), gamma))


def job(*lengths: int, cap: int = 1000, samples: int = 10_000) -> Job:
    known = LengthDistribution.from_samples(list(lengths) * samples, "history")
    return Job(0, 10, cap, known, 0)


def says(*bins: int) -> NDArray[np.float64]:
    """Scores that give nearly all to these bins, alike."""
    p = np.full(11, 1e-4)
    p[[*bins]] = 1.0
    return np.log(p / p.sum())[None]


def chance(one: Job, above: float, up_to: float) -> float:
    refined = one.refined
    assert refined is not None
    inside = (refined.lengths > above) & (refined.lengths <= up_to)
    return float(refined.weights[inside].sum())


def test_scores_are_wanted_early_on_and_then_now_and_again() -> None:
    due = [age for age in range(200) if is_due(age)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]


def test_scores_choose_among_the_lengths_that_the_prompt_foretold() -> None:
    one = job(20, 400)
    # Nothing but a look at the age: what is shorter is out.
    assert posterior().refine([one], [0], BASE[:1]) == [one]
    assert chance(one, 0, 30) == pytest.approx(0.5, abs=0.01)
    posterior().refine([one], [32], BASE[:1])
    assert chance(one, 300, 500) > 0.99
    other = job(20, 400)
    posterior().refine([other], [1], says(9))  # 257 to 512 left
    assert chance(other, 300, 500) > 0.99
    assert other.revision == 1


def test_what_was_seen_at_one_age_holds_at_the_next() -> None:
    one = job(20, 400)
    rule = posterior()
    rule.refine([one], [1], says(9))
    rule.refine([one], [2], says(*range(11)))
    assert chance(one, 300, 500) > 0.99
    # Forgotten, if evidence is to fade.
    other = job(20, 400)
    fading = posterior(gamma=0.0)
    fading.refine([other], [1], says(9))
    fading.refine([other], [2], says(*range(11)))
    assert chance(other, 300, 500) == pytest.approx(0.5, abs=0.01)


def test_scores_count_as_much_as_those_of_their_band_of_ages() -> None:
    betas = np.array([0.0, 1.0, 0.0])
    rule = Posterior(Reading(EDGES, BANDS, BASE, 1.0, betas, 1.0))
    one, other = job(20, 400), job(20, 400)
    rule.refine([one], [0], says(9))  # of the first band, which says nothing
    assert chance(one, 300, 500) == pytest.approx(0.5, abs=0.01)
    rule.refine([one, other], [1, 16], np.concatenate([says(9), says(9)]))
    assert chance(one, 300, 500) > 0.99
    assert chance(other, 300, 500) == pytest.approx(0.5, abs=0.01)


def test_a_probe_that_says_what_is_always_so_says_nothing() -> None:
    base = np.log(np.array([[0.5, *[0.05] * 10]] * 3))
    one = job(20, 400)
    Posterior(Reading(EDGES, BANDS, base)).refine([one], [1], base[:1])
    assert chance(one, 0, 30) == pytest.approx(0.5, abs=0.01)


def test_a_length_that_no_prompt_had_can_be_found() -> None:
    one = job(20, samples=50)
    rule = posterior()
    for age in (1, 2, 4, 8):
        rule.refine([one], [age], says(9))
    assert chance(one, 200, 540) > 0.95
    assert chance(one, 0, 1000) == pytest.approx(1.0)


def test_an_age_that_comes_again_is_no_news() -> None:
    one, same = job(20, 400), job(20, 400)
    rule = posterior(alpha=1.0, beta=0.3)
    rule.refine([one], [4], says(9))
    rule.refine([same], [4], says(9))
    assert rule.refine([one, same], [4, 2], np.concatenate([says(3), says(3)])) == []
    assert one.revision == same.revision == 1


def test_many_at_once_are_as_one_by_one() -> None:
    lengths = [(20, 400), (5,), (700, 800, 90), (30, 31)]
    caps = [1000, 64, 900, 4000]
    many = [job(*of, cap=cap) for of, cap in zip(lengths, caps, strict=True)]
    alone = [job(*of, cap=cap) for of, cap in zip(lengths, caps, strict=True)]
    rng = np.random.default_rng(0)
    rule = posterior(0.9, 0.7, 0.8)
    for age in (0, 1, 4, 32):
        log_p = np.log(rng.dirichlet(np.ones(11), 4))
        rule.refine(many, [age] * 4, log_p)
        for one, row in zip(alone, log_p, strict=True):
            rule.refine([one], [age], row[None])
    for one, same in zip(many, alone, strict=True):
        assert one.refined is not None
        assert same.refined is not None
        cells = same.refined.weights.size
        assert one.refined.weights[:cells] == pytest.approx(same.refined.weights)
        assert one.refined.weights[cells:].sum() == 0


def test_past_the_cap_there_is_nothing_to_say() -> None:
    one = job(20, cap=64)
    assert posterior().refine([one], [64], says(3)) == []
    assert one.revision == 0


def test_without_a_forecast_nothing_is_refined() -> None:
    one = job(20)
    one.distribution = None
    assert posterior().refine([one], [1], says(3)) == []


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(1, 4000),
    st.lists(st.integers(0, 10), min_size=1, max_size=5),
)
def test_it_is_a_distribution_of_longer_lengths(
    lengths: list[int], cap: int, seen: list[int]
) -> None:
    one = job(*lengths, cap=cap, samples=3)
    rule = posterior()
    for age, likely in enumerate(seen):
        rule.refine([one], [2 * age], says(likely))
        if one.refined is not None and one.refined.age_tokens < cap:
            assert one.refined.weights.sum() == pytest.approx(1.0)
            assert np.all(one.refined.weights[one.refined.lengths <= one.refined.age_tokens] == 0)
            assert np.all(np.diff(one.refined.lengths) >= 0)
            assert one.refined.lengths[one.refined.weights > 0].max() <= cap


@pytest.mark.parametrize(
    "change",
    [
        {"edges": np.array([1, 2, 3])},
        {"band_ages": np.array([1])},
        {"log_base": np.zeros((1, 1))},
        {"log_base": np.full((3, 11), math.nan)},
        {"beta": np.array([-1.0])},
        {"beta": np.ones(2)},
        {"beta": np.array([0.1, math.nan, 1.0])},
        {"gamma": math.nan},
    ],
)
def test_a_reading_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    fields: dict[str, object] = {"edges": EDGES, "band_ages": BANDS, "log_base": BASE}
    with pytest.raises(ValueError, match=next(iter(change))):
        Reading(**{**fields, **change})  # type: ignore[arg-type]


def mean_left_tokens(q: NDArray[np.float64], width_tokens: float) -> float:
    """L_t = sum of q_i m_i, with m_i the middle of bin i."""
    return float(q @ (width_tokens * (np.arange(len(q)) + 0.5)))


def test_trails_filter_moves_probability_down_and_keeps_evidence() -> None:
    q = np.array([0.0, 0.0, 1.0, 0.0])
    assert moved_down(q, 10.0).tolist() == pytest.approx([0, 0.1, 0.9, 0])
    known = moved_down(q, 10.0, 10)
    assert mean_left_tokens(known, 10.0) == pytest.approx(15.0, abs=2.0)
    # Evidence for the second bin, then scores that say nothing.
    first, flat = np.array([0.1, 0.7, 0.1, 0.1]), np.full(4, 0.25)
    prose = filtered(first, flat, 1e9)
    assert prose == pytest.approx(first)


def test_trails_filter_refines_jobs_at_every_token() -> None:
    rule, one, other = TrailFilter(10.0), job(25), job(25)
    p = np.log(np.array([[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]))
    assert rule.refine([one, other], [0, 0], p) == [one, other]
    assert rule.refine([one], [1], p[1:]) == [one]
    wanted = filtered(np.exp(p[0]), np.exp(p[1]), 10.0)
    assert one.refined is not None
    assert one.refined.weights == pytest.approx(wanted)
    left = one.refined.lengths @ one.refined.weights - one.refined.age_tokens
    assert left == pytest.approx(mean_left_tokens(wanted, 10.0))
    assert rule.refine([one], [1], p[:1]) == []
    # A message lost on the way: two tokens at once.
    rule.refine([other], [2], p[:1])
    assert other.refined is not None
    expected = filtered(np.exp(p[1]), np.exp(p[0]), 10.0, 2)
    assert other.refined.weights == pytest.approx(expected)


def test_two_ages_in_one_message_are_as_one_after_the_other() -> None:
    for make in (posterior(gamma=0.9), TrailFilter(10.0)):
        rule: Refiner = make
        one, other = job(20, 400), job(20, 400)
        assert rule.refine([one, one], [1, 2], np.concatenate([says(9), says(8)])) == [one]
        rule.refine([other], [1], says(9))
        rule.refine([other], [2], says(8))
        assert one.refined is not None
        assert other.refined is not None
        assert one.refined.weights == pytest.approx(other.refined.weights)
