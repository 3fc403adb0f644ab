"""Predicted lengths, and indices of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.distribution import LengthDistribution
from sage_sched.index import IndexTable, MeanCost
from sage_sched.steps import Cost, num_steps
from tests.sage_sched.strategies import MAX_LENGTH, costs, distributions

lengths_with_cuts = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30)


@given(distributions(), st.integers(1, MAX_LENGTH))
def test_a_cap_cuts_longer_lengths(lengths: LengthDistribution, cap: int) -> None:
    capped = lengths.capped(cap)
    assert capped.lengths[-1] <= cap
    below = lengths.lengths < cap
    assert capped.weights[capped.lengths < cap] == pytest.approx(lengths.weights[below])
    assert capped.mean() == pytest.approx(np.minimum(lengths.lengths, cap) @ lengths.weights)


@given(distributions(), st.integers(0, MAX_LENGTH))
def test_survivors_keep_their_proportions(lengths: LengthDistribution, age: int) -> None:
    survivors = lengths.surviving(age)
    if survivors is None:
        assert lengths.lengths[-1] <= age
        return
    assert survivors.lengths[0] > age
    longer = lengths.lengths > age
    expected = lengths.weights[longer] / lengths.weights[longer].sum()
    assert survivors.weights == pytest.approx(expected)


@given(distributions(), distributions(), st.floats(0.01, 0.99), st.floats(0.01, 20))
def test_means_are_mixed_and_scaled(
    one: LengthDistribution, other: LengthDistribution, share: float, factor: float
) -> None:
    mixed, scaled = one.mixed(other, share), one.scaled(factor)
    assert mixed.mean() == pytest.approx(one.mean() * (1 - share) + other.mean() * share)
    assert scaled.mean() == pytest.approx(factor * one.mean(), abs=1)
    assert scaled.source == one.source


@given(distributions(), st.integers(2, 20))
def test_compressing_keeps_the_mean(lengths: LengthDistribution, max_atoms: int) -> None:
    compressed = lengths.compressed(max_atoms)
    assert compressed.lengths.size <= max_atoms
    # Each group's mean is rounded to a whole token.
    assert compressed.mean() == pytest.approx(lengths.mean(), abs=0.51)
    assert lengths.lengths[0] <= compressed.lengths[0]
    assert compressed.lengths[-1] <= lengths.lengths[-1]


@given(distributions(), st.floats(0, 1))
def test_a_quantile_is_the_first_length_to_reach_it(lengths: LengthDistribution, q: float) -> None:
    value = lengths.quantile(q)
    assert lengths.weights[lengths.lengths <= value].sum() >= q - 1e-6
    assert lengths.weights[lengths.lengths < value].sum() <= q + 1e-6


@given(distributions(), st.integers(1, 2 * MAX_LENGTH))
def test_the_tail_is_one_share_in_n_plus_one(lengths: LengthDistribution, cap: int) -> None:
    tailed = lengths.with_tail(cap)
    assert tailed.lengths[-1] <= cap
    longest = int(lengths.lengths[-1])
    beyond = tailed.weights[tailed.lengths > longest].sum()
    expected = 1 / (lengths.effective_samples + 1) if longest < cap else 0.0
    assert beyond == pytest.approx(expected)


@given(lengths_with_cuts)
def test_censoring_gives_kaplan_and_meier(observations: list[tuple[int, bool]]) -> None:
    values = [value for value, _ in observations]
    cuts = [cut for _, cut in observations]
    estimate = LengthDistribution.from_samples(values, "history", censored=cuts)
    for t in sorted(set(values)):
        # Kaplan and Meier's product over the lengths at which answers ended, up to t.
        survival = 1.0
        for u in sorted({v for v, cut in observations if not cut and v <= t}):
            ended = sum(1 for v, cut in observations if v == u and not cut)
            at_risk = sum(1 for v in values if v >= u)
            survival *= 1 - ended / at_risk
        if t < max(values):
            assert estimate.weights[estimate.lengths > t].sum() == pytest.approx(survival)


@pytest.mark.parametrize(
    ("lengths", "weights", "samples"),
    [
        ([], [], 1.0), ([5, 3], [0.5, 0.5], 1.0), ([0, 3], [0.5, 0.5], 1.0),
        ([1, 3], [0.5, 0.6], 1.0), ([1, 3], [1.5, -0.5], 1.0), ([1, 3], [np.nan, 1.0], 1.0),
        ([1, 3], [0.5, 0.5], 0.0), ([1, 3], [0.5, 0.5], np.nan), ([1, 3], [1.0], 1.0),
    ],
)  # fmt: skip
def test_junk_is_refused(lengths: list[int], weights: list[float], samples: float) -> None:
    with pytest.raises(ValueError, match=r".+"):
        LengthDistribution(np.array(lengths, np.int64), np.array(weights), samples, "prior")


def test_a_sample_of_zero_tokens_counts_as_one_and_none_can_be_changed() -> None:
    lengths = LengthDistribution.from_samples([0, 3], "history")
    assert lengths.lengths.tolist() == [1, 3]
    with pytest.raises(ValueError, match="read-only"):
        lengths.weights[0] = 1.0


def brute_force(lengths: LengthDistribution, cost: Cost, input_tokens: int, age: int) -> float:
    """Compute the definition, over every stopping point."""
    spent = cost(input_tokens, age) if age else 0.0
    atoms = [
        (cost(input_tokens, length) - spent, weight)
        for length, weight in zip(lengths.lengths.tolist(), lengths.weights.tolist(), strict=True)
        if length > age
    ]
    best = float("inf")
    for stop, _ in atoms:
        mean_spent = sum(weight * min(x, stop) for x, weight in atoms)
        done = sum(weight for x, weight in atoms if x <= stop)
        best = min(best, mean_spent / done)
    return best


@given(
    distributions(),
    costs,
    st.integers(1, 3000),
    st.integers(1, 2 * MAX_LENGTH),
    st.integers(1, 700),
)
def test_the_table_holds_the_definition_at_every_boundary(
    lengths: LengthDistribution, cost: Cost, input_tokens: int, cap: int, interval: int
) -> None:
    table = IndexTable(
        lengths, cost, input_tokens=input_tokens, max_tokens=cap, interval_tokens=interval
    )
    longest_seen = int(lengths.capped(cap).lengths[-1])
    tailed = lengths.capped(cap).with_tail(cap)
    for age in range(0, longest_seen, interval):
        expected = brute_force(tailed, cost, input_tokens, age)
        assert table.index(age) == pytest.approx(expected, rel=1e-9)


@given(distributions(), st.sampled_from([0, 100, 700, 2000]))
def test_the_mean_cost_is_of_longer_answers(lengths: LengthDistribution, age: int) -> None:
    mean = MeanCost(lengths, num_steps, input_tokens=9, max_tokens=9000, interval_tokens=100)
    tailed = lengths.with_tail(9000)
    left = tailed.surviving(age)
    if left is not None:
        assert mean.index(age) == pytest.approx(left.mean() - age)
