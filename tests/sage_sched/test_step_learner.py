"""Step times that are learned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, replace
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from bench.simulator.presets import H800_QWEN3_32B, PRESETS, Engine
from sage_sched.app.config import StepTimeConfig
from sage_sched.step_learner import (
    COLUMNS,
    INTERVAL_STEPS,
    MEMORY_STEPS,
    StepLearner,
    _nonnegative_minimum,
    fit,
    is_worth_reporting,
)
from sage_sched.steps import StepTime, seconds_on
from tests.sage_sched.step_traffic import Step, compiling_steps, steps

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


# If the host was delayed, it sees two steps end at once: the second seems to take no time.
@pytest.mark.parametrize(
    ("stalls", "fitted"),
    [
        (
            {0: 50.0, 10: 50.0},
            (4.252e-3, 1.696e-3, 1.508e-4, 1.91e-8, 0.01304, 2.984e-4, 1.004e-6),
        ),
        ({0: 1e-6, 19: 2.0}, (4.259e-3, 1.625e-3, 1.504e-4, 1.793e-8, 0.01298, 2.954e-4, 1.003e-6)),
    ],
)
def test_stalls_hardly_count(stalls: dict[int, float], fitted: tuple[float, ...]) -> None:
    """stalls: by place among twenty steps, the factor on a step's time."""
    taken = list(islice(steps(RICH, 0, rate=8.0), 1500))
    measured = [
        (work, seconds * stalls.get(i % 20, 1.0)) for i, (work, seconds) in enumerate(taken)
    ]
    found = fit(*table(measured), SHIPPED)
    assert predicted(taken, found) == pytest.approx(predicted(taken, RICH), rel=0.1)
    assert astuple(found) == pytest.approx(fitted, rel=1e-3)


def test_few_short_steps_among_long_ones_are_learned_in_spite_of_stalls() -> None:
    # Chunks of long prompts take thirty decode steps each, and are most of the steps.
    random, taken = np.random.default_rng(0), list[Step]()
    truth = StepTime(0.01, 0.0, 3.5e-5, 0.0, 0.009, 1e-5, 1e-8)
    for number in range(2_048):
        work, seconds = [1.0, 1, 8192, 8192**2 / 2, 0, 0, 0], 0.01 + 3.5e-5 * 8192
        if number % 5 < 2:
            work, seconds = decode(int(random.integers(20, 60)), 40_000, truth)
            seconds *= 4 if random.random() < 0.02 else 1
        taken.append((work, seconds * random.lognormal(0, 0.05)))
    found = fit(*table(taken), SHIPPED)
    assert found.decode_s(40, 40_000) == pytest.approx(truth.decode_s(40, 40_000), rel=0.02)


def test_costs_without_steps_are_the_prior_times_one_factor() -> None:
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


TRAFFIC_S = 120.0


def times(step_time: StepTime, factor: float) -> StepTime:
    return StepTime(*(factor * seconds for seconds in astuple(step_time)))


def exchanged(step_time: StepTime) -> StepTime:
    """Step times with prefill and decode exchanged."""
    *prefill, pair_s, decode_base_s, decode_request_s, kv_token_s = astuple(step_time)
    return StepTime(decode_base_s, decode_request_s, kv_token_s, pair_s, *prefill)


def learned(learner: StepLearner, taken: Iterable[Step]) -> StepTime:
    for work, seconds in taken:
        learner.add(work, seconds)
        if learner.is_due:
            learner.learn()
    return learner.step_time


def test_it_learns_less_and_less_often() -> None:
    learner, at = StepLearner(SHIPPED), list[int]()
    for number in range(1, 4_097):
        learner.add([0, 0, 0, 0, 1, 8, 8_000], 0.02)
        if learner.is_due:
            learner.learn()
            at.append(number)
    assert at == [256, 512, 768, 1_152, 1_728, 2_592, 3_616]


@pytest.mark.parametrize("engine", [H800_QWEN3_32B, PRESETS["a100-qwen1.5-7b"]])
@pytest.mark.parametrize("wrong", [lambda truth: times(truth, 5), exchanged, lambda truth: SHIPPED])
def test_costs_are_right_after_two_minutes(engine: Engine, wrong) -> None:  # type: ignore[no-untyped-def]
    truth = engine.step_time
    learner = StepLearner(wrong(truth))
    taken = list(islice(steps(truth, 0, rate=3.0), 20_000))
    in_time = np.cumsum([seconds for _, seconds in taken]) <= TRAFFIC_S
    found = learned(learner, taken[: int(in_time.sum())])
    costs = [seconds_on(replace(engine.server_facts(), step_time=of)) for of in (truth, found)]
    for lengths in product((32, 512, 4096), repeat=2):
        assert costs[1](*lengths) == pytest.approx(costs[0](*lengths), rel=0.1)


@pytest.mark.parametrize(
    ("prefills", "noise", "compile_s", "most"),
    [
        (0.1, 0.02, 0.0, 0.05),
        (0.1, 0.02, 0.04, 0.05),
        (0.3, 0.15, 0.04, 0.05),
        (0.03, 0.02, 0.04, 0.05),
        # Three prefills are left. Their mean is off by 0.06 or more in every second trace.
        (0.03, 0.15, 0.04, 0.10),
    ],
)
def test_costs_are_right_soon_after_the_start(
    prefills: float, noise: float, compile_s: float, most: float
) -> None:
    truth, errors = StepTime(0.009, 3e-4, 2.6e-5, 2e-10, 0.0055, 3e-5, 6e-8), []
    typical = [[1, n, t, t * t / n / 2, 0, 0, 0] for n, t in ((1, 256), (1, 2048), (4, 4096))]
    typical += [[0, 0, 0, 0, 1, 32, 32_768]] * 3
    for seed in range(12):
        taken = compiling_steps(truth, seed, prefills=prefills, noise=noise, compile_s=compile_s)
        found = learned(StepLearner(SHIPPED), islice(taken, 512))
        steps_s = [np.dot(typical, astuple(step_time)) for step_time in (found, truth)]
        errors.append(np.abs(steps_s[0] / steps_s[1] - 1))
    assert np.median(np.array(errors)[:, :3]) <= most
    assert np.median(np.array(errors)[:, 3:]) <= 0.02


def test_learned_costs_outlive_the_steps_behind_them() -> None:
    truth = PRESETS["a100-qwen1.5-7b"].step_time
    learner = StepLearner(SHIPPED)
    learned(learner, islice(steps(truth, 0, rate=3.0), 2 * MEMORY_STEPS))
    decodes = (step for step in steps(truth, 1, rate=3.0) if step[0][4])
    found = learned(learner, islice(decodes, 3 * MEMORY_STEPS))
    prefill_s = truth.prefill_s(1, 1000, 1000**2 / 2)
    assert found.prefill_s(1, 1000, 1000**2 / 2) == pytest.approx(prefill_s, rel=0.15)
    assert SHIPPED.prefill_s(1, 1000, 1000**2 / 2) != pytest.approx(prefill_s, rel=0.5)


def test_errors_of_step_times_are_reported_by_kind_of_step() -> None:
    learner = StepLearner(SHIPPED)
    learner.add([0, 0, 0, 0, 1, 1, 10], 0.0)  # nothing is learned of a step that took no time
    assert (learner.num_steps, learner.factor(SHIPPED), learner.errors(SHIPPED)) == (0, 1, {})
    for work, seconds in islice(steps(SHIPPED, 0, rate=3.0, noise=0.0), 3 * MEMORY_STEPS):
        learner.add(work, seconds * (2 if work[0] else 1))
        if work[0]:  # together with ten decoding requests
            learner.add([*work[:4], 0, 10, 0], 4 * seconds)
    shares = {"prefill": 0.5, "decode": 0.0, "mixed": 0.75}
    assert learner.errors(SHIPPED) == pytest.approx(shares, abs=0.02)


def test_the_error_is_that_of_steps_not_yet_learned_from() -> None:
    noise = 0.1
    learner = StepLearner(SHIPPED)
    assert learner.error is None
    learned(learner, islice(steps(SHIPPED, 0, rate=3.0, noise=noise), 1000))
    assert learner.error == pytest.approx(0.674 * noise, rel=0.4)  # half of a normal's are less
    before = learner.num_steps
    for work, seconds in islice(steps(times(SHIPPED, 2), 1, rate=3.0), INTERVAL_STEPS):
        learner.add(work, seconds)
    learner.learn()
    assert learner.error == pytest.approx(1.0, rel=0.3)
    assert learner.num_steps == before + INTERVAL_STEPS


def test_uncached_tokens_attend_to_cached_ones() -> None:
    step_time = StepTime(0.01, 0.0, 0.001, 1e-6, 0.02, 0.0, 0.0)
    server = replace(H800_QWEN3_32B.server_facts(), step_time=step_time)
    saved_s = 0.1 + 1e-6 * (300 * 150 - 200 * (100 + 100))
    cost = seconds_on(server)
    assert cost(300, 9) - cost(300, 9, 100) == pytest.approx(saved_s)
    assert server.recompute_s(300) - server.recompute_s(300, 100) == pytest.approx(saved_s)


def test_cost_changes_above_a_tenth_are_reported() -> None:
    server = H800_QWEN3_32B.server_facts()
    for factor, is_told in ((1.0, False), (1.05, False), (1.2, True), (0.8, True)):
        assert is_worth_reporting(times(SHIPPED, factor), SHIPPED, server) is is_told
    for factor in (0.5, 2):
        prefill = replace(SHIPPED, prefill_token_s=factor * SHIPPED.prefill_token_s)
        assert is_worth_reporting(prefill, SHIPPED, server)
