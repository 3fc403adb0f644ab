from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from predictor_store.predict.asked import NUM_FEATURES, OWN, SHAPED, Scope
from predictor_store.predict.history import History
from predictor_store.predict.predictor import MAX_ATOMS, predict, prior, within_session
from predictor_store.predict.regression import GeneralLength
from predictor_store.predict.threshold import predict_by_threshold
from sage_sched.distribution import LengthDistribution
from tests.predictor_store.samples import answer, learn, share_of, unit_vectors

PLAIN, STOPS, GRAMMAR = Scope("base"), Scope("base", "a"), Scope("base", "b", SHAPED)


def at(cosine: float) -> NDArray[np.float32]:
    """A vector of this cosine to at(1)."""
    return np.array([cosine, (1 - cosine**2) ** 0.5], np.float32)


def history_of(*records: tuple[float, int, str], general: GeneralLength | None = None) -> History:
    """records: the cosine of a prompt to at(1), its answer's length, and its origin."""
    history = History(2, 0, 2000, general)
    for cosine, length, origin in records:
        learn(history, at(cosine), length, origin=origin)
    return history


def known(found: LengthDistribution | None) -> LengthDistribution:
    assert found is not None
    return found


def predicted(history: History, vector: NDArray[np.float32], scope: str = "") -> LengthDistribution:
    return known(predict(history, vector, scope))


def test_warm_data_fades_as_history_comes() -> None:
    warm = [(0.6 + i / 1e3, 900, "warm") for i in range(100)]
    shares = []
    for num in (0, 10, 100, 300):
        real = [(0.6 + i / 1e3, 30, "history") for i in range(num)]
        found = predicted(history_of(*warm, *real), at(1))
        shares.append(share_of(found, 900))
        assert found.source == ("warm" if shares[-1] > 0.5 else "history")
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1


@pytest.mark.parametrize(
    ("ended", "asked", "is_believed"),
    [
        (PLAIN, PLAIN, True),
        (STOPS, PLAIN, True),  # by itself, although it could have been stopped
        (STOPS.stopped(), STOPS, True),
        (STOPS.stopped(), PLAIN, False),
        (STOPS.stopped(), GRAMMAR, False),
        (STOPS.stopped(), Scope("base", "c"), False),
        (GRAMMAR, GRAMMAR, True),
        (GRAMMAR, PLAIN, False),
        (GRAMMAR, STOPS, False),
        (GRAMMAR.stopped(), Scope("base", "c", SHAPED), False),
    ],
)
def test_clients_ends_count_where_asked(ended: Scope, asked: Scope, is_believed: bool) -> None:
    history = history_of()
    learn(history, at(0.9), *range(800, 840), scope=PLAIN.name)
    learn(history, at(1), *[2] * 600, scope=ended.name)  # more than a prediction looks at
    found = predicted(history, at(1), asked.name)
    assert (found.quantile(0.5) == 2) is is_believed
    assert (found.quantile(0.05) >= 800) is not is_believed
    # The prior counts these ends unless clients forced them.
    assert (known(prior(history)).quantile(0.5) == 2) is (ended.end == OWN)


@pytest.mark.parametrize("scope", [PLAIN, STOPS.stopped()])
def test_no_number_of_cut_answers_hides_those_that_ended(scope: Scope) -> None:
    history = history_of()
    learn(history, at(0.9), *range(800, 900), scope=PLAIN.name)
    learn(history, at(1), *[1] * 1500, censored=scope is PLAIN, scope=scope.name)
    assert predicted(history, at(1), PLAIN.name).quantile(0.01) >= 800


def test_where_all_ends_are_made_by_clients_the_prior_goes_by_them() -> None:
    history = history_of()
    learn(history, at(1), 7, scope=GRAMMAR.name)
    assert known(prior(history)).lengths.tolist() == [7]


def test_censored_answers_count_as_longer() -> None:
    history = history_of()
    for length, censored in ((10, False), (20, True), (30, False)):
        learn(history, at(1), length, censored=censored)
    for found in (predicted(history, at(1)), known(prior(history))):
        assert found.lengths.tolist() == [10, 30]
        assert found.weights == pytest.approx([1 / 3, 2 / 3])
    assert known(prior(history)).source == "prior"


def test_sixteen_answers_of_a_session_weigh_as_much_as_everything_else() -> None:
    said = LengthDistribution.from_samples([10, 20], "history")
    assert within_session(said, []) == said
    assert share_of(within_session(said, [30] * 16), 30) == pytest.approx(0.5)
    assert share_of(within_session(said, [30, 20]), 30) == pytest.approx(1 / 18)
    many = LengthDistribution.from_samples(range(1, MAX_ATOMS + 1), "history")
    assert within_session(many, [1000]).lengths.size <= MAX_ATOMS


# The first number of a vector predicts the length.
GENERAL = GeneralLength(
    "made up", np.array([2.0, 0.0]), np.linspace(-1, 1, 8), 5.0, 1.0, np.linspace(2, 8, 8)
)


def varied(general: GeneralLength) -> tuple[History, NDArray[np.float32]]:
    """A full history of records of all kinds, and the vectors of its 40 prompts."""
    rng = np.random.default_rng(0)
    vectors = np.hstack([unit_vectors(40, dimension=6), rng.integers(-1, 2, (40, NUM_FEATURES))])
    vectors = vectors.astype(np.float32)
    scopes = "", *(of.name for of in (PLAIN, STOPS, STOPS.stopped(), GRAMMAR))
    history = History(6, NUM_FEATURES, 300, general)
    for i in range(400):
        vector = vectors[rng.integers(40)]
        length = round(float(np.exp(4 + 2 * vector[0] + vector[-1] + rng.normal(0, 0.5))))
        one = answer(
            vector, length, censored=rng.random() < 0.2, scope=str(rng.choice(scopes)),
            origin=rng.choice(["history", "history", "warm"]),
        )  # fmt: skip
        place = history.add(one, unfinished=i % 9 == 0)
        if place and i % 18 == 0:
            longer = dataclasses.replace(one, output_tokens=2 * length, censored=False)
            assert history.amend(place, longer)
        if i == 370:
            history.fit()
    return history, vectors


# The mean and effective samples of the prior, and by scope of a known prompt, an unknown one and an
# outlier.
MEASURED = [
    [371.16, 254.000],
    [154.82, 7.502], [167.92, 19.941], [1675.76, 7.391],
    [159.97, 7.456], [171.04, 19.419], [1540.74, 7.374],
    [88.39, 7.463], [155.11, 19.294], [762.99, 7.379],
    [104.81, 9.133], [151.19, 22.516], [1028.69, 9.070],
]  # fmt: skip


def test_predictions_are_those_that_were_measured() -> None:
    """If these numbers change, so do all predictions: measure them again (docs/predictor.md)."""
    weights = np.linspace(-0.3, 0.3, 6 + NUM_FEATURES)
    history, vectors = varied(dataclasses.replace(GENERAL, weights=weights))
    asked = [np.append(of, vectors[3, 6:]) for of in (vectors[3, :6], unit_vectors(1, 1, 6)[0])]
    asked.append(np.append(vectors[3, :6], np.full(NUM_FEATURES, 3, np.float32)))
    scopes = "", PLAIN.name, STOPS.name, GRAMMAR.name
    of_scopes = [predicted(history, vector, scope) for scope in scopes for vector in asked]
    found = [[of.mean(), of.effective_samples] for of in (known(prior(history)), *of_scopes)]
    np.testing.assert_allclose(found, MEASURED, rtol=1e-3)


def generally(*records: tuple[float, int]) -> History:
    return history_of(*((*known, "history") for known in records), general=GENERAL)


def test_the_first_requests_are_told_apart_by_lengths_in_general() -> None:
    long, short = (predicted(generally(), at(c)) for c in (0.9, -0.9))
    assert long.source == short.source == "general"
    assert predicted(generally(), at(0)).lengths[-1] == round(np.exp(5 + 2**0.5))
    assert long.mean() == pytest.approx(short.mean() * np.exp(2 * 1.8), rel=0.1)
    anything = known(prior(generally()))
    assert anything.quantile(0.1) < short.mean() < long.mean() < anything.quantile(0.95)
    # The level follows what has ended.
    levels = [predicted(generally((0.2, of), (0.4, of)), at(-0.9)).mean() for of in (20, 2000)]
    assert levels[1] > 5 * levels[0]


def test_an_empty_history_knows_nothing() -> None:
    assert predict(history_of(), at(1)) is None
    assert prior(history_of()) is None


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 5000)), min_size=1), st.data()
)
def test_predictions_are_bounded(
    records: list[tuple[bool, bool, int]], data: st.DataObject
) -> None:
    vectors = unit_vectors(len(records) + 1, data.draw(st.integers(0, 9)), 3)
    history = History(3, 0, 50)
    for vector, (warm, censored, length) in zip(vectors[1:], records, strict=True):
        learn(history, vector, length, censored=censored, origin="warm" if warm else "history")
    history.fit()
    found = predicted(history, vectors[0])
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
    found = known(predict_by_threshold(history_of(*near, *far), at(1), 0.7))
    assert (found.lengths.tolist(), found.source) == (lengths, source)
    assert predict_by_threshold(history_of(), at(1), 0.8) is None
