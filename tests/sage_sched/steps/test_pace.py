from __future__ import annotations

import numpy as np
import pytest

from sage_sched.steps.fit import fit
from sage_sched.steps.pace import Pace
from sage_sched.steps.time import StepTime

TRUE = StepTime(0.041, 0.001, 0.000174, 2e-9, 0.035, 0.0002, 1.64e-7)


def test_it_follows_what_steps_take_and_one_that_was_held_up_says_little() -> None:
    pace = Pace()
    for _ in range(800):
        pace.add(0.13, 0.1)
    assert pace.factor == pytest.approx(1.3, rel=0.01)
    pace.add(100.0, 0.1)
    for _ in range(7):
        pace.add(0.13, 0.1)
    assert pace.factor < 1.4
    pace.reset()
    assert pace.factor == 1.0


@pytest.mark.parametrize(("real_s", "predicted_s"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_what_is_no_step_does_not_count(real_s: float, predicted_s: float) -> None:
    pace = Pace()
    for _ in range(100):
        pace.add(real_s, predicted_s)
    assert pace.factor == 1.0


def steps(rng: np.random.Generator, kind: str, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of step_fit.COLUMNS, and seconds with 5 % of noise. A mixed step counts as a prefill
    with rows that decode (patches/scheduler/calibration.py)."""
    prefills, tokens = rng.integers(1, 5, num_steps), rng.integers(16, 2048, num_steps)
    decodes, kv_tokens = rng.integers(1, 100, num_steps), rng.integers(1000, 70_000, num_steps)
    pairs = tokens * tokens / 2.0
    columns, seconds = [], []
    for n, t, p, d, kv in zip(prefills, tokens, pairs, decodes, kv_tokens, strict=True):
        if kind == "prefill":
            columns.append([1, n, t, p, 0, 0, 0])
            seconds.append(TRUE.prefill_s(n, t, p))
        elif kind == "decode":
            columns.append([0, 0, 0, 0, 1, d, kv])
            seconds.append(TRUE.decode_s(d, kv))
        else:
            columns.append([1, n, t, p, 0, d, kv])
            seconds.append(TRUE.mixed_s(n, t, p, d, kv))
    noise = 1 + 0.05 * rng.standard_normal(num_steps)
    return np.array(columns, np.float64), np.array(seconds) * noise


@pytest.mark.parametrize(("kind", "limit"), [("prefill", 0.10), ("decode", 0.10), ("mixed", 0.15)])
def test_what_steps_take_is_foreseen_of_steps_that_were_not_learned_from(
    kind: str, limit: float
) -> None:
    rng = np.random.default_rng(0)
    seen = [steps(rng, of, 200) for of in ("prefill", "decode", "mixed")]
    work = np.concatenate([rows for rows, _ in seen])
    seconds = np.concatenate([took for _, took in seen])
    prior = StepTime(*(5 * getattr(TRUE, name) for name in StepTime.__slots__))
    learned = fit(work, seconds, prior)
    held_out, real_s = steps(rng, kind, 200)
    coefficients = np.array([getattr(learned, name) for name in StepTime.__slots__])
    errors = np.abs(held_out @ coefficients / real_s - 1)
    assert errors.mean() < limit
