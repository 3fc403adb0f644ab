"""Tokens on time, counted one by one and in closed form."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from bench.simulator.on_time import num_on_time

SECONDS = st.floats(0.001, 2.0)


def by_hand(num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float) -> int:
    late = 0
    now_s = 0.0
    for j in range(1, num_steps + 1):
        now_s += first_s + (j - 1) * growth_s
        late += now_s > due_s + (j - 1) * tpot_s + 1e-9 * max(1.0, now_s)
    return num_steps - late


@given(st.integers(0, 300), SECONDS, st.floats(0.0, 0.01), st.floats(-50.0, 50.0), SECONDS)
@example(5, 0.05, 0.0, math.inf, 0.1)
@example(5, 0.05, 0.0, -0.9, 0.3)  # the last one has caught up
@example(40, 0.01, 0.004, -0.05, 0.05)  # those in the middle
def test_a_leap_counts_as_its_steps_do(
    num_steps: int, first_s: float, growth_s: float, due_s: float, tpot_s: float
) -> None:
    # Tokens that come at their deadline go either way.
    least, most = (
        by_hand(num_steps, first_s, growth_s, due_s + shift_s, tpot_s) for shift_s in (-1e-6, 1e-6)
    )
    assert least <= num_on_time(num_steps, first_s, growth_s, due_s, tpot_s) <= most


def test_only_the_first_token_is_due_without_a_tpot() -> None:
    assert num_on_time(5, 0.05, 0.0, 0.0, math.inf) == 4
