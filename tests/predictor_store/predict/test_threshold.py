"""SageSched's published rule."""

from __future__ import annotations

import numpy as np
import pytest

from predictor_store.predict.history import History
from predictor_store.predict.threshold import predict_by_threshold
from predictor_store.store.file import Record

ASKED = np.array([1.0, 0.0], np.float32)
NEAR, FAR = np.array([0.8, 0.6], np.float32), np.array([0.0, 1.0], np.float32)


def history(**numbers: int) -> History:
    """A history with these numbers of records of each kind. Own, near answers have 10 tokens,
    public ones 20, far ones 30."""
    found = History(2, 0, 100)
    kinds = {"own": (NEAR, 10, "history"), "public": (NEAR, 20, "warm"), "far": (FAR, 30, "warm")}
    for name, number in numbers.items():
        vector, tokens, origin = kinds[name]
        for _ in range(number):
            found.add(Record(vector, tokens, 0, False, origin))
    return found


@pytest.mark.parametrize(
    ("numbers", "lengths", "source"),
    [
        ({"own": 8, "public": 8, "far": 8}, [10], "history"),
        ({"own": 4, "public": 4, "far": 8}, [10, 20], "warm"),
        ({"own": 2, "public": 2, "far": 4}, [10, 20, 30], "prior"),
    ],
)
def test_public_records_count(numbers: dict[str, int], lengths: list[int], source: str) -> None:
    found = predict_by_threshold(history(**numbers), ASKED, 0.7)
    assert found is not None
    assert (found.lengths.tolist(), found.source) == (lengths, source)
    assert predict_by_threshold(history(), ASKED, 0.8) is None
