from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.engines.baseline import UnloadedTime, sustained
from bench.engines.clock.device import Device
from bench.engines.server.client import Answer
from bench.simulator.request import SimRequest
from bench.simulator.result import Served, alone_s
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig

times = st.floats(1e-4, 1.0)


def fitted(rows: list[tuple[int, int, float]]) -> UnloadedTime:
    return UnloadedTime.fitted([Answer(0.0, ((0.0, 1), (s, o)), i) for i, o, s in rows])


@given(times, times, times)
def test_the_fit_finds_a_linear_time(base: float, per_input: float, per_output: float) -> None:
    true = UnloadedTime(base, per_input, per_output)
    assert true.description == (
        f"{1e3 * base:.0f} ms + {1e3 * per_input:.3f} ms per input token + {1e3 * per_output:.3f} "
        "ms per output token"
    )
    rows = [(i, o, true.seconds(i, o)) for i in (20, 400) for o in (16, 64, 256)]
    for inputs, outputs, seconds in rows:
        assert seconds == pytest.approx(base + inputs * per_input + outputs * per_output)
        assert fitted(rows).seconds(inputs, outputs) == pytest.approx(seconds, rel=1e-6)


def slots(answers: NDArray[np.int64], prompts: NDArray[np.int64]) -> Callable[[Any], Served]:
    """A server of 10 slots, first come, first served, for requests of these lengths: 10 ms per
    answer token, 1 ms per prompt token."""
    lengths = [*zip(prompts.tolist(), answers.tolist(), strict=True)]

    def serve(arrivals_s: NDArray[np.float64]) -> Served:
        free_s, first_s, last_s = np.zeros(10), [], []
        for at_s, (prompt_tokens, answer_tokens) in zip(arrivals_s, lengths, strict=False):
            slot = int(np.argmin(free_s))
            first_s.append(max(at_s, free_s[slot]) + 0.001 * prompt_tokens)
            free_s[slot] = first_s[-1] + 0.01 * answer_tokens
            last_s.append(free_s[slot])
        return Served.of(
            lambda *_: 1.0, [SimRequest(0.0, i, o, o, None, "") for i, o in lengths[: len(last_s)]],
            arrivals_s, np.array(first_s), np.array(last_s), num_next_on_time=np.zeros(0, int),
            pauses_s=(), longest_gap_s=np.zeros(0), gaps=Counter(), cached_tokens=None,
            num_refused=0,
        )  # fmt: skip

    return serve


@pytest.mark.parametrize(
    ("kind", "measured"),
    [
        ("light tails", (9.708, 1.009)),
        ("heavy tails", (3.431, 2.889)),
        ("long prompts", (3.323, 1.009)),
        ("fits at once", (3.484, 2.765)),
        ("long ones first", (8.728, 1.132)),
    ],
)
def test_the_capacity_is_that_of_a_long_run(kind: str, measured: tuple[float, float]) -> None:
    rng, number = np.random.default_rng(0), 6000
    answers = rng.exponential(100, number).astype(int) + 1
    prompts = np.full(number, 20)
    if kind == "heavy tails":
        answers[rng.random(number) < 0.1] *= 20
    if kind == "long prompts":
        prompts = rng.integers(20, 4000, number)
    if kind == "fits at once":
        answers = np.where(rng.random(number) < 0.05, 5_000, 20)
    if kind == "long ones first":
        answers[: number // 5] = 1.6 * answers[: number // 5]
    sustains = 10 / (0.01 * answers.mean() + 0.001 * prompts.mean())
    found = sustained(slots(answers, prompts), lambda _: number)
    assert found.capacity == pytest.approx(sustains, rel=0.05)
    assert found == pytest.approx(measured, abs=1e-3)


@given(st.integers(1, 20_000), st.integers(1, 500))
def test_a_device_clock_knows_the_time_of_a_request_alone(inputs: int, outputs: int) -> None:
    device = Device.named("h800-qwen3-32b", speed=4.0)
    alone = SimRequest(0.0, inputs, outputs, outputs, None, "")
    result = simulate(device.engine, "fcfs", SageConfig(), [alone])
    assert alone_s(device.engine, inputs, outputs) == pytest.approx(result.ttlt_s[0])
