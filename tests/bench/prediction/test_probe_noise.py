"""Scores that are drawn by true lengths."""

from __future__ import annotations

import numpy as np
import pytest

from bench.engines.simulator.request import SimRequest
from bench.prediction.probe_noise import (
    MEMORY_TOKENS,
    LogNormal,
    Replayed,
    errors,
    reading_of,
    spread_of,
)
from bench.prediction.probe_simulation import fitted, with_scores
from sage_sched.distribution import LengthDistribution

pytestmark = pytest.mark.slow

LENGTHS = np.random.default_rng(0).integers(5, 400, 300)


def test_errors_are_normal_and_mostly_what_they_were_a_token_before() -> None:
    drawn = errors(40_000, np.random.default_rng(0))
    assert drawn.std() == pytest.approx(1.0, abs=0.15)
    steps = int(MEMORY_TOKENS)
    correlation = np.corrcoef(drawn[:-steps], drawn[steps:])[0, 1]
    assert correlation == pytest.approx(np.exp(-1), abs=0.12)


@pytest.mark.parametrize("recipe", ["log", "trail"])
def test_what_is_seen_is_believed_as_far_as_it_can_be_relied_on(recipe: str) -> None:
    reading = reading_of(recipe, LENGTHS)
    rng, said, sure = np.random.default_rng(1), [], []
    for spread in (0.2, 1.0):
        says = LogNormal(reading, spread, int(LENGTHS.max()))
        true = []
        for length in LENGTHS:
            log_p = says(int(length), rng.normal(size=length))[4]
            assert np.exp(log_p).sum() == pytest.approx(1.0)
            place = int(np.searchsorted(reading.edges, length - 4)) - 1
            true.append(np.exp(log_p[place]))
            said.append(np.exp(log_p).max())
        sure.append(np.mean(true))
    assert sure[0] > sure[1] + 0.1


def test_the_spread_is_what_makes_the_error_so_many_times_less() -> None:
    means = np.full(LENGTHS.size, LENGTHS.mean())
    spread = spread_of(2.66, LENGTHS, means)
    left = np.concatenate([n - np.arange(n) for n in LENGTHS])
    known = np.concatenate([np.maximum(LENGTHS.mean() - np.arange(n), 1) for n in LENGTHS])
    normal = np.random.default_rng(3).normal(size=left.size)
    ours = np.abs(left * np.exp(spread * normal) - left).mean()
    assert np.abs(known - left).mean() / ours == pytest.approx(2.66, rel=0.05)
    assert spread_of(8.0, LENGTHS, means) < spread < spread_of(1.0, LENGTHS, means)


def test_scores_are_replayed_of_answers_at_the_same_place() -> None:
    reading = reading_of("log", LENGTHS)
    # Each row says by its first entry how much was left.
    scores = [
        np.repeat((n - np.arange(n, dtype=float))[:, None], reading.edges.size - 1, axis=1)
        for n in LENGTHS
    ]
    says = Replayed(reading, LENGTHS.tolist(), scores)
    length = 100
    found = says(length, np.random.default_rng(0).normal(size=length))
    true = length - np.arange(length)
    bins = np.searchsorted(reading.edges, true)
    assert np.searchsorted(reading.edges, found[:, 0]).tolist() == bins.tolist()
    # A longer answer than any that was seen: what is nearest.
    assert says(2000, np.zeros(2000)).shape[0] == 2000


def test_the_same_errors_whoever_reads_them_and_weights_that_suit_them() -> None:
    known = LengthDistribution.from_samples(LENGTHS.tolist(), "history")
    requests = [SimRequest(0.0, 10, int(n), 500, known, "any") for n in LENGTHS[:60]]
    reading = reading_of("log", LENGTHS)
    says = LogNormal(reading, 0.3, int(LENGTHS.max()))
    first, again = with_scores(requests, says, 1), with_scores(requests, says, 1)
    assert all(
        np.array_equal(a.scores[age], b.scores[age])
        for a, b in zip(first, again, strict=True)
        for age in a.scores
    )
    assert len(first[0].scores) == requests[0].output_tokens
    assert fitted(requests, says, reading).beta.max() > 0
