"""Scores of rank 0 reach all ranks and count there alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from patches.messages import Scores
from patches.probe.scores import MANY_RUNNING, PASSES_A_MESSAGE
from tests.patches.probe.conftest import Rank
from tests.patches.scheduler.test_state import fail
from tests.patches.schedulers import StandInBatch

# By these logits the answer is long.
LONG = np.array([[0.0, 0, 0, 0, 0, 0, 0, 9.0]], np.float32)


def read(rank: Rank, age: int, logits: Any = LONG, num_others: int = 0) -> Any:
    """Give the request a token in a batch of others, and return the broadcast of rank 0."""
    batch: Any = StandInBatch([rank.req] * (1 + num_others))
    commits = [SimpleNamespace(output_index=age), *[None] * num_others]
    rank.probing.read(batch, commits, np.repeat(logits, 1 + num_others, axis=0), None)
    return rank.probing.polled()


def test_scores_are_repeated_until_they_return(rank: Rank, other_rank: Rank) -> None:
    first = read(rank, 1)
    assert isinstance(first, Scores)
    assert rank.job.revision == 0  # rank 0, too, counts broadcast scores only
    again = read(rank, 2)
    assert again.ages == [1, 2]
    rank.probing.scored(first)
    assert rank.job.revision == 1
    left = rank.probing.polled()
    assert left is not None
    assert left.ages == [2]
    rank.probing.scored(again)  # the first of them has come before
    assert rank.job.revision == 2
    assert rank.probing.polled() is None
    other_rank.probing.scored(again)
    assert rank.job.refined is not None
    assert other_rank.job.refined is not None
    assert other_rank.job.refined.weights == pytest.approx(rank.job.refined.weights)


def test_scores_of_many_requests_are_sent_every_few_passes(rank: Rank) -> None:
    ages = range(1, PASSES_A_MESSAGE + 1)
    *held_back, scores = [read(rank, age, num_others=MANY_RUNNING) for age in ages]
    assert held_back == [None] * (PASSES_A_MESSAGE - 1)
    assert scores.ages == [*ages]
    rank.probing.scored(scores)
    assert rank.probing.polled() is None
    # With few requests they are sent at once.
    assert read(rank, 8) is not None


def test_scores_that_are_not_finite_are_counted_and_dropped(rank: Rank) -> None:
    assert read(rank, 1, np.full((1, 8), np.nan, np.float32)) is None
    assert rank.probing.stats()["probe"]["num_not_finite"] == 1
    assert read(rank, 2) is not None


def test_a_rank_that_can_read_no_longer_still_takes_scores_in(rank: Rank) -> None:
    scores = read(rank, 1)
    read(rank, 2, LONG[:0])  # of no request, though one decodes
    read(rank, 4)
    rank.probing.scored(scores)
    assert rank.job.revision == 1
    assert rank.probing.polled() is None


def test_scores_of_a_request_that_has_ended_are_dropped(rank: Rank) -> None:
    scores = read(rank, 1)
    rank.probing.ended(rank.req, was_aborted=False)
    rank.probing.scored(scores)
    assert rank.probing.stats()["probe"]["num_scores"] == 0


def test_after_an_update_of_weights_scores_count_no_more(rank: Rank) -> None:
    scores = read(rank, 1)
    rank.probing.weights_updated()
    rank.probing.scored(scores)
    assert rank.job.revision == 0


def test_an_error_in_the_policy_is_counted(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = read(rank, 1)
    monkeypatch.setattr(rank.probing._refiner, "refine", fail)
    rank.probing.scored(scores)
    assert rank.failures.num_failures == 1
