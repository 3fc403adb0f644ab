from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.distribution import LengthDistribution
from sage_sched.index import IndexTable, MeanCost
from sage_sched.steps import Cost, num_steps
from tests.sage_sched.strategies import MAX_LENGTH, costs, distributions


def brute_force(lengths: LengthDistribution, cost: Cost, input_tokens: int, age: int) -> float:
    """The definition, over every stopping point."""
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
