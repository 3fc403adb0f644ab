"""All predictions of a scripted day are compared in service/test_recorded.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from predictor_store.predict.asked import SHAPED, Scope
from predictor_store.predict.history import History
from predictor_store.predict.predictor import MAX_ATOMS, predict, prior
from predictor_store.predict.threshold import predict_by_threshold
from tests.predictor_store.samples import answer, learn, unit_vectors


def at(cosine: float) -> NDArray[np.float32]:
    """A vector of this cosine to at(1)."""
    return np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)


def history_of(*records: tuple[float, int, str]) -> History:
    """records: the cosine of a prompt to at(1), its answer's length, and its origin."""
    history = History(2, 0, 2000)
    for cosine, length, origin in records:
        learn(history, at(cosine), length, origin=origin)
    return history


@pytest.mark.parametrize("scope", ["", Scope("base", "a").stopped().name])
def test_no_number_of_cut_answers_hides_those_that_ended(scope: str) -> None:
    history = history_of(*[(0.9, length, "history") for length in range(800, 900)])
    learn(history, at(1), *[1] * 1500, censored=not scope, scope=scope)
    found = predict(history, at(1))
    assert found is not None
    assert found.quantile(0.01) >= 800


def test_an_empty_history_knows_nothing_and_one_of_forced_ends_these() -> None:
    history = history_of()
    assert predict(history, at(1)) is prior(history) is None
    assert predict_by_threshold(history, at(1), 0.8) is None
    learn(history, at(1), 7, scope=Scope("base", "b", SHAPED).name)
    found = prior(history)
    assert found is not None
    assert found.lengths.tolist() == [7]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 5000)), min_size=1), st.data()
)
def test_predictions_are_bounded(
    records: list[tuple[bool, bool, int]], data: st.DataObject
) -> None:
    vectors = unit_vectors(len(records) + 1, data.draw(st.integers(0, 9)), 3)
    history = History(3, 0, 50)
    for vector, (warm, censored, length) in zip(vectors[1:], records, strict=True):
        history.add(answer(vector, length, censored=censored, origin="warm" if warm else "history"))
    history.fit()
    found = predict(history, vectors[0])
    assert found is not None
    assert found.lengths.size <= MAX_ATOMS
    lengths = [length for _, _, length in records]
    assert min(lengths) <= found.lengths[0] <= found.lengths[-1] <= max(lengths)
    assert found.effective_samples <= len(records) + 1e-6


@pytest.mark.parametrize(
    ("num_near", "num_far", "lengths", "source"),
    [(8, 8, [10], "history"), (4, 8, [10, 20], "warm"), (2, 4, [10, 20, 30], "prior")],
)
def test_the_published_rule_widens_until_it_has_enough_records(
    num_near: int, num_far: int, lengths: list[int], source: str
) -> None:
    near = [(0.8, 10, "history"), (0.8, 20, "warm")] * num_near
    far = [(0.0, 30, "warm")] * num_far
    found = predict_by_threshold(history_of(*near, *far), at(1), 0.7)
    assert found is not None
    assert (found.lengths.tolist(), found.source) == (lengths, source)
