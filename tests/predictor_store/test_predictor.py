from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from predictor_store.history import History, Origin
from predictor_store.predictor import predict, prior
from sage_sched.config import PredictorConfig
from tests.predictor_store.samples import unit_vectors

CONFIG = PredictorConfig(threshold=0.8, min_matches=3, num_nearest=4, max_atoms=16)


def at(cosine: float) -> NDArray[np.float32]:
    """A vector of this cosine to at(1)."""
    return np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)


def history_of(*records: tuple[float, int, Origin], capacity: int = 100) -> History:
    history = History(2, capacity)
    for cosine, length, origin in records:
        history.add(at(cosine), length, False, origin)
    return history


def test_enough_history_leaves_warm_data_out() -> None:
    history = history_of(
        *[(0.9, length, "history") for length in (10, 20, 30)], (1.0, 99, "warm"), (0.5, 5, "warm")
    )
    found = predict(history, at(1), CONFIG)
    assert found is not None
    assert found.source == "history"
    assert found.lengths.tolist() == [10, 20, 30]
    assert found.weights == pytest.approx([1 / 3] * 3)
    assert found.effective_samples == 3


def test_too_little_history_is_augmented_by_warm_data() -> None:
    history = history_of(
        (0.9, 10, "history"), (0.9, 20, "warm"), (0.9, 30, "warm"), (0.7, 99, "history")
    )
    found = predict(history, at(1), CONFIG)
    assert found is not None
    assert found.source == "warm"
    assert found.lengths.tolist() == [10, 20, 30]


def test_too_few_matches_take_the_nearest_nearer_ones_weighing_more() -> None:
    cosines = (0.9, 0.6, 0.3, 0.1, -0.5)
    history = history_of(*[(c, i + 1, "warm") for i, c in enumerate(cosines)])
    found = predict(history, at(1), CONFIG)
    assert found is not None
    assert found.source == "nearest"
    assert found.lengths.tolist() == [1, 2, 3, 4]
    assert all(np.diff(found.weights) < 0)
    assert 1 < found.effective_samples < 4


def test_only_unlike_prompts_still_give_a_distribution() -> None:
    found = predict(history_of((-1.0, 7, "history")), at(1), CONFIG)
    assert found is not None
    assert found.lengths.tolist() == [7]


def test_censored_answers_count_as_longer() -> None:
    history = History(2, 10)
    for length, censored in ((10, False), (20, True), (30, False)):
        history.add(at(1), length, censored, "history")
    found = predict(history, at(1), CONFIG)
    assert found is not None
    assert found.lengths.tolist() == [10, 30]
    assert found.weights == pytest.approx([1 / 3, 2 / 3])


def test_an_empty_history_knows_nothing() -> None:
    assert predict(history_of(), at(1), CONFIG) is None
    assert prior(history_of(), CONFIG) is None


def test_the_prior_is_of_all_records_alike() -> None:
    found = prior(history_of((1.0, 10, "history"), (-1.0, 30, "warm"), (0.0, 10, "warm")), CONFIG)
    assert found is not None
    assert found.source == "prior"
    assert found.lengths.tolist() == [10, 30]
    assert found.weights == pytest.approx([2 / 3, 1 / 3])


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 5000)), min_size=1), st.data()
)
def test_a_prediction_lies_within_what_was_seen(
    records: list[tuple[bool, bool, int]], data: st.DataObject
) -> None:
    vectors = unit_vectors(len(records) + 1, data.draw(st.integers(0, 9)), 3)
    history = History(3, 50)
    for vector, (warm, censored, length) in zip(vectors[1:], records, strict=True):
        history.add(vector, length, censored, "warm" if warm else "history")
    found = predict(history, vectors[0], CONFIG)
    assert found is not None
    assert found.lengths.size <= CONFIG.max_atoms
    lengths = [length for _, _, length in records]
    assert min(lengths) <= found.lengths[0] <= found.lengths[-1] <= max(lengths)
    assert found.effective_samples <= len(records) + 1e-6
