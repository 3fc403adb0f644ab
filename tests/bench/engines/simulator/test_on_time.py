"""Tokens on time, counted one by one and in closed form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines.simulator.on_time import num_on_time

SECONDS = st.floats(0.001, 2.0)


def by_hand(num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float) -> int:
    late = 0
    now_s = 0.0
    for j in range(1, num_steps + 1):
        now_s += first_s + (j - 1) * growth_s
        late += now_s > due_s + (j - 1) * tpot_s + 1e-9 * max(1.0, now_s)
    return num_steps - late


def nearly(num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float) -> range:
    """What may be counted if tokens that are due when they come go either way."""
    least, most = (
        by_hand(num_steps, first_s, growth_s, due_s + shift_s, tpot_s) for shift_s in (-1e-6, 1e-6)
    )
    return range(least, most + 1)


@given(st.integers(0, 300), SECONDS, st.floats(0.0, 0.01), st.floats(-50.0, 50.0), SECONDS)
def test_a_leap_counts_as_its_steps_do(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> None:
    counted = num_on_time(num_steps, first_s, growth_s, due_s, tpot_s)
    assert counted in nearly(num_steps, first_s, growth_s, due_s, tpot_s)


@pytest.mark.parametrize(
    ("due_s", "tpot_s", "counted"),
    [
        (math.inf, 0.1, 5),
        (0.05, 0.05, 5),  # each just on time
        (0.04, 0.05, 0),  # always as late
        (-0.9, 0.3, 1),  # the last one has caught up
        (0.2, 0.01, 4),
        (0.0, math.inf, 4),  # the first alone is due
    ],
)
def test_leaps_of_even_steps(due_s: float, tpot_s: float, counted: int) -> None:
    assert num_on_time(5, 0.05, 0.0, due_s, tpot_s) == counted


def test_steps_that_grow_longer_are_on_time_in_the_middle() -> None:
    args = (40, 0.01, 0.004, -0.05, 0.05)
    assert num_on_time(*args) == by_hand(*args)
    assert 0 < num_on_time(*args) < 40
