from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from predictor_store.predict.asked import SHAPED, Scope
from predictor_store.predict.history import History
from predictor_store.predict.predictor import predict, prior
from predictor_store.predict.threshold import predict_by_threshold
from tests.predictor_store.samples import learn


def at(cosine: float) -> NDArray[np.float32]:
    """A vector of this cosine to at(1)."""
    return np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)


def history_of(*records: tuple[float, int, str]) -> History:
    """records: the cosine of each prompt to at(1), its answer's length, and its origin."""
    history = History(2, 0, 2000)
    for cosine, length, origin in records:
        learn(history, at(cosine), length, origin=origin)
    return history


def test_an_empty_history_knows_nothing_and_one_of_forced_ends_these() -> None:
    history = history_of()
    assert predict(history, at(1)) is prior(history) is None
    assert predict_by_threshold(history, at(1), 0.8) is None
    learn(history, at(1), 7, scope=Scope("base", "b", SHAPED).name)
    found = prior(history)
    assert found is not None
    assert found.lengths.tolist() == [7]


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
