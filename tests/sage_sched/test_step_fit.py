from __future__ import annotations

from dataclasses import astuple
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from sage_sched.app.config import StepTimeConfig
from sage_sched.step_learner import COLUMNS, _nonnegative_minimum, fit
from sage_sched.steps import StepTime
from tests.sage_sched.step_traffic import Step, steps

SHIPPED = StepTimeConfig().step_time()
# Every coefficient counts.
RICH = StepTime(0.004, 0.002, 1.5e-4, 2e-8, 0.013, 3e-4, 1e-6)


def table(taken: list[Step]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([work for work, _ in taken]), np.array([seconds for _, seconds in taken])


def decode(num_requests: int, kv_tokens: float, step_time: StepTime) -> Step:
    work = [0.0, 0, 0, 0, 1, num_requests, kv_tokens]
    return work, step_time.decode_s(num_requests, int(kv_tokens))


def predicted(taken: list[Step], step_time: StepTime) -> np.ndarray:
    return np.asarray(table(taken)[0] @ np.array(astuple(step_time)))


@pytest.mark.parametrize("prior", [SHIPPED, RICH])
def test_exact_times_give_steps_back(prior: StepTime) -> None:
    taken = list(islice(steps(RICH, 0, rate=8.0, noise=0.0), 1500))
    assert predicted(taken, fit(*table(taken), prior)) == pytest.approx(
        predicted(taken, RICH), rel=0.01
    )


# Two steps' ends are seen at once if the host was held up: the second looks like nothing.
@pytest.mark.parametrize(
    ("stalls", "fitted"),
    [
        (
            {0: 50.0, 10: 50.0},
            (4.289e-3, 1.661e-3, 1.528e-4, 1.988e-8, 0.01314, 3.023e-4, 1.016e-6),
        ),
        ({0: 1e-6, 19: 2.0}, (4.467e-3, 1.439e-3, 1.517e-4, 1.637e-8, 0.01301, 3.001e-4, 1.004e-6)),
    ],
)
def test_stalls_hardly_count(stalls: dict[int, float], fitted: tuple[float, ...]) -> None:
    """stalls: of each twentieth step, how many times as long it takes."""
    taken = list(islice(steps(RICH, 0, rate=8.0), 1500))
    measured = [
        (work, seconds * stalls.get(i % 20, 1.0)) for i, (work, seconds) in enumerate(taken)
    ]
    found = fit(*table(measured), SHIPPED)
    assert predicted(taken, found) == pytest.approx(predicted(taken, RICH), rel=0.1)
    assert astuple(found) == pytest.approx(fitted, rel=1e-3)


def test_what_no_step_had_to_do_is_as_in_the_prior_times_the_one_factor() -> None:
    work, seconds = decode(8, 4000, SHIPPED)
    found = np.array(astuple(fit(*table([(work, 3 * seconds)] * 100), SHIPPED)))
    assert found == pytest.approx(3 * np.array(astuple(SHIPPED)))


@given(st.integers(0, 2**32 - 1))
def test_the_minimum_is_the_one_that_lawson_and_hanson_find(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(20, len(COLUMNS)))
    wanted = rng.normal(size=20)
    found = _nonnegative_minimum(rows.T @ rows, rows.T @ wanted)
    assert found == pytest.approx(nnls(rows, wanted)[0], abs=1e-8)


@pytest.mark.parametrize("seed", range(12))
def test_noise_hides_no_slope(seed: int) -> None:
    # Steps bound by reading the weights take the same time with any work.
    random, prior = np.random.default_rng(seed), SHIPPED
    for _ in range(4):
        taken = []
        for seconds in random.lognormal(0, 0.1, 256):
            requests = int(random.integers(1, 33))
            tokens = float(requests * random.integers(100, 900))
            step, _ = decode(requests, tokens, SHIPPED)
            if random.random() < 0.1:
                step = [1.0, requests, tokens, tokens * tokens / 2, 0, 0, 0]
            taken.append((step, 0.02 * seconds))
        prior = fit(*table(taken), prior)
        mean = table(taken)[0].mean(axis=0) * 10
        assert mean[2] * prior.prefill_token_s > 1e-5
        assert mean[6] * prior.decode_kv_token_s > 1e-5
        assert predicted(taken, prior) == pytest.approx(np.full(256, 0.02), rel=0.3)
