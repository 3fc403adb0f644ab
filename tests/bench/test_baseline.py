from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.baseline import UnloadedTime, saturated_rate
from bench.client import Answer
from bench.workload import Request


def answer(inputs: int, outputs: int, first_s: float, last_s: float) -> Answer:
    return Answer(Request("", outputs, "chat"), inputs, outputs, 0.0, first_s, last_s, 0.0, "")


times = st.floats(1e-4, 1.0)


@given(times, times, times)
def test_the_fit_finds_a_linear_time(base: float, per_input: float, per_output: float) -> None:
    true = UnloadedTime(base, per_input, per_output)
    alone = [
        answer(i, o, 0.0, base + i * per_input + o * per_output)
        for i in (20, 400)
        for o in (16, 64, 256)
    ]
    fitted = UnloadedTime.fitted(alone)
    assert [fitted.slowdown(a) for a in alone] == pytest.approx([1.0] * 6, rel=1e-6)
    assert true.slowdown(answer(5, 5, 0, 10 * (base + 5 * (per_input + per_output)))) == (
        pytest.approx(10)
    )


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900), times), min_size=3))
def test_no_time_is_negative_whatever_was_measured(rows: list[tuple[int, int, float]]) -> None:
    fitted = UnloadedTime.fitted([answer(i, o, 0.0, seconds) for i, o, seconds in rows])
    assert min(fitted) >= 0


def test_the_capacity_does_not_depend_on_how_long_the_burst_drains() -> None:
    # A server with 10 slots, first come, first served.
    rng = np.random.default_rng(0)
    for num_requests in (300, 1000):
        free_at = np.zeros(10)
        answers = []
        for _ in range(num_requests):
            slot, tokens = int(np.argmin(free_at)), int(rng.exponential(100)) + 1
            began, free_at[slot] = free_at[slot], free_at[slot] + tokens * 0.01
            answers.append(answer(1, tokens, began + 1e-6, free_at[slot]))
        # 10 slots, 1.01 s a request.
        assert saturated_rate(answers) == pytest.approx(10 / 1.01, rel=0.15)
