from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_store.predict import predictor
from predictor_store.predict.embedder import NUM_BESIDE, dimension
from predictor_store.predict.history import History
from predictor_store.predict.regression import MIN_PROMPTS, GeneralLength
from predictor_store.store.file import Record
from tests.predictor_store.samples import answer, grown, learn, unit_vectors

DIMENSION = 8
# The index keeps vectors in whole numbers of 8 bits.
ROUNDING = 0.01
# Whether each record is warm. Lengths are arrival numbers.
arrivals = st.lists(st.booleans(), max_size=60)


def kept(arrivals: list[bool], capacity: int) -> list[int]:
    """Return the arrival numbers that stay. Warm data is dropped first, then the oldest."""
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


def traffic(num: int) -> list[Record]:
    """Records of all kinds: repeated prompts, cut, warm, with adapters, limits and features."""
    rng = np.random.default_rng(num)
    features = rng.integers(-1, 2, (num, NUM_BESIDE))
    vectors = np.hstack(
        [unit_vectors(num, num, dimension("static") - NUM_BESIDE), features]
    ).astype(np.float32)
    vectors[1::7] = vectors[0:-1:7]
    scopes = ("", "lora", ".stop\n", "|stop\nlora", "=json\n")
    return [
        answer(
            vector,
            int(rng.integers(900)),
            censored=bool(rng.random() < 0.3),
            scope=scopes[rng.integers(5)],
            origin="warm" if i % 11 == 0 else "history",
        )
        for i, vector in enumerate(vectors)
    ]


@pytest.mark.parametrize("capacity", [1_500, 1_300, 700])
def test_loading_gives_the_same_history_as_adding_one_by_one(capacity: int) -> None:
    stored, later = traffic(1_300), traffic(400)
    loaded, added = (
        History.of_encoder("static", capacity, GeneralLength.shipped("static")) for _ in range(2)
    )
    loaded.load(stored)
    for one in stored:
        added.add(one)
    for new in (later[:200], later[200:]):  # the oldest leave, in the same order
        for name, array in vars(added).items():
            if isinstance(array, np.ndarray):
                np.testing.assert_allclose(vars(loaded)[name], array, 1e-9, 1e-12, err_msg=name)
        for one in later[::40]:
            said, expected = (
                predictor.predict(each, one.vector, one.scope) for each in (loaded, added)
            )
            assert said is not None
            assert expected is not None
            assert said.lengths.tolist() == expected.lengths.tolist()
            np.testing.assert_allclose(said.weights, expected.weights)
        for history in (loaded, added):
            history.fit()
            assert len({history.add(one) for one in new}) > 1


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
    """Python's own hashes differ between processes. If they set the order of sums, scores differ in
    their last bits, and finally forecasts too."""
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


def test_a_fit_during_traffic_also_scores_new_records() -> None:
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
