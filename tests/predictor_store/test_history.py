from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from predictor_store.history import History
from tests.predictor_store.samples import unit_vectors

DIMENSION = 8
# (is it warm, its length, its cut-off): the length tells the records apart.
arrivals = st.lists(st.booleans(), max_size=60)


def kept(arrivals: list[bool], capacity: int) -> list[int]:
    """What the rule leaves, by arrival number: warm data goes first, then the oldest."""
    left: list[int] = []
    for i, _ in enumerate(arrivals):
        left.append(i)
        if len(left) > capacity:
            left.remove(min(left, key=lambda j: (not arrivals[j], j)))
    return left


def filled(arrivals: list[bool], capacity: int) -> tuple[History, np.ndarray]:
    vectors = unit_vectors(max(len(arrivals), 1), dimension=DIMENSION)
    history = History(DIMENSION, capacity)
    for i, warm in enumerate(arrivals):
        history.add(vectors[i], i, i % 3 == 0, "warm" if warm else "history")
    return history, vectors


@given(arrivals, st.integers(1, 20))
def test_warm_data_is_first_out_then_the_oldest(arrivals: list[bool], capacity: int) -> None:
    history, _ = filled(arrivals, capacity)
    numbers = history.lengths[: len(history)]
    assert sorted(numbers) == kept(arrivals, capacity)
    assert [bool(w) for w in history.warm[: len(history)]] == [arrivals[i] for i in numbers]
    assert [bool(c) for c in history.censored[: len(history)]] == [i % 3 == 0 for i in numbers]


@given(arrivals, st.integers(1, 20), st.integers(1, 30), st.integers(0, 10), st.floats(-1, 1))
def test_search_agrees_with_brute_force(
    arrivals: list[bool], capacity: int, num_nearest: int, seed: int, threshold: float
) -> None:
    history, vectors = filled(arrivals, capacity)
    query = unit_vectors(1, seed + 1000, DIMENSION)[0]
    numbers = np.array(kept(arrivals, capacity), int)
    expected = vectors[numbers] @ query if numbers.size else np.empty(0)

    cosines, slots = history.nearest(query, num_nearest)
    assert len(cosines) == len(slots) == min(num_nearest, len(history))
    np.testing.assert_allclose(cosines, np.sort(expected)[::-1][: len(cosines)], atol=1e-6)
    np.testing.assert_allclose(vectors[history.lengths[slots]] @ query, cosines, atol=1e-6)

    matching = set(history.lengths[history.matches(query, threshold)])
    assert matching >= set(numbers[expected >= threshold + 1e-6])
    assert matching <= set(numbers[expected >= threshold - 1e-6])


def test_a_cosine_equal_to_the_threshold_matches() -> None:
    history = History(2, 4)
    history.add(np.array([1, 0], np.float32), 1, False, "history")
    history.add(np.array([0.5, 0.75**0.5], np.float32), 2, False, "history")
    query = np.array([1, 0], np.float32)
    assert set(history.matches(query, 1.0)) == {0}
    assert set(history.matches(query, 0.5)) == {0, 1}
    assert set(history.matches(query, np.nextafter(np.float32(0.5), np.float32(1)))) == {0}
