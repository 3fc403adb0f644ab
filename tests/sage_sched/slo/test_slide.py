"""Algorithm 1 against the paper's lines, one by one; worth against sums over all tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.distribution import LengthDistribution
from sage_sched.slo import Queue, Slide
from sage_sched.slo.slide import keys
from sage_sched.slo.slo_state import Worth
from sage_sched.steps import ServerFacts, StepTime, seconds_on

JOBS = st.lists(
    st.tuples(
        st.floats(1e-4, 2.0),
        # Keys are as fine as a microsecond.
        st.floats(-5.0, 10.0).map(lambda remain_s: round(remain_s, 5)),
        st.floats(0.01, 50.0).map(lambda density: round(density, 5)),
    ),
    min_size=1,
    max_size=30,
)


def algorithm_1(
    jobs: list[tuple[float, float, float]], fixed_s: float, least_s: float
) -> tuple[float, list[bool], list[int]]:
    """Lines 1 to 13, with xLLM's rule for the minimum: budget, who is urgent, the order."""
    t_min = math.inf
    for exec_s, remain_s, _ in jobs:
        if not remain_s < exec_s + fixed_s:
            t_min = min(t_min, remain_s)
    budget_s = max(t_min, least_s)
    # Numpy's sum: another order of adding may differ in the last bit.
    work_s = float(np.array([exec_s for exec_s, _, _ in jobs]).sum())
    if budget_s == math.inf:
        phi_s = work_s
    elif budget_s > fixed_s:
        phi_s = budget_s / (budget_s - fixed_s) * work_s
    else:
        phi_s = math.inf
    urgent = [remain_s < phi_s for _, remain_s, _ in jobs]
    first = sorted((p for p in range(len(jobs)) if urgent[p]), key=lambda p: -jobs[p][2])
    then = sorted((p for p in range(len(jobs)) if not urgent[p]), key=lambda p: jobs[p][1])
    return budget_s, urgent, first + then


@given(JOBS, st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_the_order_is_that_of_algorithm_1(
    jobs: list[tuple[float, float, float]], fixed_s: float, least_s: float
) -> None:
    queue = Queue(*(np.array(column) for column in zip(*jobs, strict=True)))
    slide = Slide(fixed_s, least_s)
    budget_s, urgent, order = algorithm_1(jobs, fixed_s, least_s)
    assert slide.budget_s(queue) == budget_s
    found = slide.is_urgent(queue, budget_s)
    assert found.tolist() == urgent
    assert np.argsort(keys(queue, found), kind="stable").tolist() == order


SERVER = ServerFacts(70_000, 256, StepTime(0.0, 0.0, 1e-3, 0.0, 0.04, 0.0, 1e-6), 0.0)
COST = seconds_on(SERVER)


def by_hand(
    known: LengthDistribution, weights: tuple[float, float], age: int, first: int, input_tokens: int
) -> float:
    """The best V(K) / C(K), token by token, over the lengths that are known."""
    weight_of = dict(zip(known.lengths.tolist(), known.weights.tolist(), strict=True))
    left = sum(weight for length, weight in weight_of.items() if length > age)
    spent = COST(input_tokens, age) if age else 0.0
    worth = cost = best = 0.0
    for k in range(age + 1, int(known.lengths[-1]) + 1):
        survival = sum(weight for length, weight in weight_of.items() if length >= k) / left
        now = COST(input_tokens, k)
        worth += (weights[0] if k == 1 else weights[1]) * survival * (k >= first)
        cost += survival * (now - spent)
        spent = now
        if k in weight_of:
            best = max(best, worth / cost)
    return best


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(0, 50),
    st.integers(0, 30),
    st.integers(1, 2000),
)
def test_worth_is_a_sum(lengths: list[int], age: int, late: int, input_tokens: int) -> None:
    known = LengthDistribution.from_samples(lengths, "history")
    worth = Worth.of(known, COST, input_tokens)
    first = age + 1 + late
    spent_s = COST(input_tokens, age) if age else 0.0
    found = worth.density(5.0, 2.0, age, first, spent_s)
    if age >= max(lengths):
        assert found == 0.0
    else:
        assert found == pytest.approx(by_hand(known, (5.0, 2.0), age, first, input_tokens))
