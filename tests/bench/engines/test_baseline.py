from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engines.baseline import Saturation, UnloadedTime
from bench.engines.clock.device import Device
from bench.engines.server.client import Answer
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import alone_s
from bench.engines.simulator.run import simulate
from sage_sched.config import SageConfig


def answer(inputs: int, outputs: int, first_s: float, last_s: float) -> Answer:
    return Answer(0.0, ((first_s, 1), (last_s, outputs)), inputs)


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
    for one in alone:
        seconds = fitted.seconds(one.input_tokens, one.output_tokens)
        assert seconds == pytest.approx(one.ttlt_s, rel=1e-6)
    assert true.seconds(5, 7) == pytest.approx(base + 5 * per_input + 7 * per_output)
    assert f"{base * 1e3:.0f} ms" in true.description


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900), times), min_size=3))
def test_no_time_is_negative_whatever_was_measured(rows: list[tuple[int, int, float]]) -> None:
    fitted = UnloadedTime.fitted([answer(i, o, 0.0, seconds) for i, o, seconds in rows])
    assert min(fitted) >= 0


def test_the_capacity_does_not_depend_on_how_long_the_burst_drains() -> None:
    # A server with 10 slots, first come, first served.
    rng = np.random.default_rng(0)
    for num_requests in (300, 1000):
        free_at = np.zeros(10)
        first_s, last_s = np.zeros(num_requests), np.zeros(num_requests)
        for i in range(num_requests):
            slot, tokens = int(np.argmin(free_at)), int(rng.exponential(100)) + 1
            began, free_at[slot] = free_at[slot], free_at[slot] + tokens * 0.01
            first_s[i], last_s[i] = began + 1e-6, free_at[slot]
        # 10 slots, 1.01 s a request.
        saturated = Saturation.measured(first_s, last_s)
        assert saturated.capacity == pytest.approx(10 / 1.01, rel=0.15)
        assert saturated.service_s == pytest.approx((last_s - first_s).mean())


def test_half_an_answer_counts_half() -> None:
    # One of a single token, one that is done half when the last begins, and that last one.
    saturated = Saturation.measured(np.array([1.0, 2.0, 4.0]), np.array([1.0, 6.0, 9.0]))
    assert saturated == (pytest.approx(1.5 / 4), pytest.approx((0 + 4 + 5) / 3))


@given(st.integers(1, 20_000), st.integers(1, 500))
def test_a_device_clock_knows_what_a_request_takes_alone(inputs: int, outputs: int) -> None:
    device = Device.named("h800-qwen3-32b", speed=4.0)
    alone = SimRequest(0.0, inputs, outputs, outputs, None, "")
    result = simulate(device.engine, "fcfs", SageConfig(), [alone])
    assert alone_s(device.engine, inputs, outputs) == pytest.approx(result.ttlt_s[0])
