from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_store.predict.asked import Scope
from predictor_store.predict.history import History
from predictor_store.predict.index import VectorIndex, embeddings
from predictor_store.predict.regression import MIN_PROMPTS
from tests.predictor_store.samples import answer, grown, learn, unit_vectors

DIMENSION = 8
# The index keeps vectors in whole numbers of 8 bits.
ROUNDING = 0.01
# Whether each record is warm. Lengths are arrival numbers.
arrivals = st.lists(st.booleans(), max_size=60)


def kept(arrivals: list[bool], capacity: int) -> list[int]:
    """Arrival numbers that stay: warm data goes first, then the oldest."""
    left: list[int] = []
    for i, _ in enumerate(arrivals):
        left.append(i)
        if len(left) > capacity:
            left.remove(min(left, key=lambda j: (not arrivals[j], j)))
    return left


def filled(arrivals: list[bool], capacity: int) -> tuple[History, np.ndarray]:
    vectors = unit_vectors(max(len(arrivals), 1), dimension=DIMENSION)
    history = History(DIMENSION, 0, capacity)
    for i, warm in enumerate(arrivals):
        learn(history, vectors[i], i, censored=i % 3 == 0, origin="warm" if warm else "history")
    return history, vectors


@given(arrivals, st.integers(1, 20), st.integers(1, 30), st.integers(0, 10))
def test_warm_data_is_first_out_then_the_oldest_and_search_agrees_with_brute_force(
    arrivals: list[bool], capacity: int, num_nearest: int, seed: int
) -> None:
    history, vectors = filled(arrivals, capacity)
    of, numbers = len(history), np.array(kept(arrivals, capacity), int)
    stored = zip(history.lengths[:of], history.warm[:of], history.censored[:of], strict=True)
    assert sorted(stored) == [(i, arrivals[i], i % 3 == 0) for i in numbers]
    query = unit_vectors(1, seed + 1000, DIMENSION)[0]
    expected = vectors[numbers] @ query if numbers.size else np.empty(0)

    cosines, slots = history.nearest(query, num_nearest)
    assert len(cosines) == len(slots) == min(num_nearest, of)
    np.testing.assert_allclose(cosines, np.sort(expected)[::-1][: len(cosines)], atol=ROUNDING)
    np.testing.assert_allclose(vectors[history.lengths[slots]] @ query, cosines, atol=ROUNDING)


def test_a_forked_process_can_search() -> None:
    history, vectors = grown(200)
    history._index._searched.search(vectors[:, :DIMENSION].copy(), 5)  # starts OpenMP's threads
    process = multiprocessing.get_context("fork").Process(
        target=history.nearest, args=(vectors[0], 5)
    )
    process.start()
    process.join(60)
    hangs = process.is_alive()
    process.kill()
    assert not hangs


def test_every_process_fits_the_same_score_to_the_same_records() -> None:
    """Python's own hashes differ between processes. If records are summed in their order, scores
    differ in their last bits, and in the end so do forecasts."""
    code = (
        "from tests.predictor_store.samples import grown\n"
        "history, _ = grown(200)\n"
        "history.fit()\n"
        "print(history.score.weights.tobytes().hex())"
    )
    command = [sys.executable, "-c", code]
    said = {
        subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_a_fit_beside_the_traffic_scores_what_came_meanwhile_too() -> None:
    history, vectors = grown(300)
    fitting = history.fitting()
    assert fitting is not None
    newcomers = unit_vectors(20, 7, DIMENSION)
    for vector in newcomers:  # they take the places of the oldest
        learn(history, vector, 50)
    held_out = fitting.fit()
    history.install(fitting, held_out)
    assert history.score is not None
    slots = [history.nearest(vector, 1)[1][0] for vector in newcomers]
    assert np.allclose(history.scores[slots], history.score.of(newcomers), atol=5 * ROUNDING)
    assert held_out is not None
    kept = history.nearest(vectors[-1], 1)[1][0]
    position = fitting.slots.tolist().index(kept)
    assert history.scores[kept] == held_out[1][position]


def test_it_is_fitted_again_when_it_has_changed() -> None:
    history, vectors = grown(200)
    for num, is_due in ((1, True), (10, False), (1, True)):
        learn(history, vectors[0], *[5] * num)
        assert (history.fitting() is not None) is is_due
    for num in (MIN_PROMPTS - 1, MIN_PROMPTS):
        history, _ = grown(num)
        history.fit()
        assert (history.score is not None) is (num == MIN_PROMPTS)


def test_of_a_prompt_asked_too_often_the_newest_answers_count() -> None:
    history = History(8, 0, capacity=100)
    vector = unit_vectors(1, 0, 8)[0]
    learn(history, vector, *range(1, 151))  # the last fifty in the slots of the first
    for num in (1, 10, 99):
        cosines, slots = history.nearest(vector, num)
        assert cosines.size == num
        assert sorted(history.lengths[slots]) == list(range(151 - num, 151))
    hidden = history.lengths > 140
    assert sorted(history.lengths[history.nearest(vector, 9, hidden=hidden)[1]]) == [
        *range(132, 141)
    ]


@pytest.mark.parametrize("capacity", [60, 300])
def test_what_the_search_does_not_read_still_puts_in_order(capacity: int) -> None:
    rng = np.random.default_rng(0)
    columns = np.arange(0, 32, 2)
    part, whole = VectorIndex(32, columns), VectorIndex(32)
    vectors = rng.normal(size=(300, 32)).astype(np.float32) * np.where(np.arange(32) % 2, 1, 3)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for i, vector in enumerate(vectors):
        for index in (part, whole):
            if i < capacity:
                index.add(vector)
            else:
                index.replace(i % capacity, vector)
    slots = np.arange(len(part))
    np.testing.assert_array_equal(part.codes(slots), whole.codes(slots))
    for query in vectors[-20:]:
        found, at = part.nearest(query, 30)
        cosines, nearest = whole.nearest(query, len(whole))
        assert (np.diff(found) <= 0).all()
        np.testing.assert_allclose(found, embeddings(part.codes(at)) @ query, atol=0.02)
        assert at[0] == nearest[0]
        assert np.isin(at[:10], nearest[:30]).mean() > 0.6
        every, _ = part.nearest(query, 10_000)
        np.testing.assert_allclose(every, cosines, atol=1e-6)


def test_an_answer_that_goes_on_is_amended_until_it_has_made_room() -> None:
    vectors = unit_vectors(3, dimension=DIMENSION)
    history = History(DIMENSION, 0, 1)
    place = history.add(answer(vectors[0], 64, censored=True), unfinished=True)
    assert place is not None
    stopped = Scope("base", "a").stopped().name
    for length, goes_on, scope in ((128, True, ""), (200, False, stopped)):
        now = answer(vectors[0], length, censored=goes_on, scope=scope)
        assert history.amend(place, now, unfinished=goes_on)
        known = history.lengths, history.censored, history.unfinished, history.limited
        assert [of[0] for of in known] == [length, goes_on, goes_on, scope == stopped]
    assert history.fitting() is not None  # what has ended is new
    learn(history, vectors[1], 5)
    assert not history.amend(place, answer(vectors[0], 128, censored=True))
    assert history.lengths.tolist() == [5]
    assert history.add(answer(vectors[2], 9, origin="warm")) is None
