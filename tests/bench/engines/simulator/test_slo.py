"""Deadlines in the simulator: tokens on time, mixed steps, and ProServe beside sage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import Progress, SimRequest
from bench.engines.simulator.run import make_node, result_of, simulate
from bench.engines.simulator.state import Options
from sage_sched.config import DecodeConfig, SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Hints
from sage_sched.policies.sage import SageParameters
from sage_sched.slo import Promise
from sage_sched.steps import StepTime, attended_pairs
from tests.bench.engines.simulator.invariants import watch

CONFIG = SageConfig()
ENGINE = Engine(
    step_time=StepTime(0.02, 0.0, 2e-4, 1e-9, 0.03, 1e-4, 2e-6),
    kv_pool_tokens=4000,
    max_running_requests=16,
    chunked_prefill_size=256,
    swap_token_s=1e-6,
)
MIXED = replace(ENGINE, mixed_chunk=True)
CLASSES = (
    Hints(weight=2.0, ttft_slo_ms=500.0, tpot_slo_ms=45.0, slo_class="high"),
    Hints(weight=1.0, ttft_slo_ms=2000.0, tpot_slo_ms=60.0, slo_class="low"),
    Hints(ttft_slo_ms=800.0, tpot_slo_ms=50.0, slo_class="eager"),
    NO_HINTS,
)


def traffic(num_requests: int, seed: int, classes: Sequence[Hints]) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(0.15, num_requests))
    return [
        SimRequest(
            arrival_s=float(arrival_s),
            input_tokens=int(rng.integers(5, 600)),
            output_tokens=(output_tokens := int(rng.integers(1, 200))),
            max_new_tokens=300,
            distribution=LengthDistribution.from_samples(
                [max(1, output_tokens // 2), output_tokens, 300], "warm"
            ),
            class_name="",
            hints=classes[int(rng.integers(len(classes)))],
        )
        for arrival_s in arrivals_s
    ]


SHORT_STEPS = replace(ENGINE, step_time=StepTime(0.004, 0.0, 2e-4, 1e-9, 0.006, 1e-5, 2e-7))


@pytest.mark.parametrize("engine", [SHORT_STEPS, MIXED], ids=["unmixed, short steps", "mixed"])
def test_under_sage_a_promised_tpot_is_kept_by_who_stays(engine: Engine) -> None:
    whole = replace(engine, chunked_prefill_size=1024)

    def gaps_s(hints: Hints) -> Sequence[float]:
        found = simulate(whole, "sage", CONFIG, traffic(150, 5, [hints]))
        stayed = (found.num_yields == 0) & (found.num_retractions == 0)
        assert stayed.mean() > 0.1
        gaps: Sequence[float] = found.longest_gap_s[stayed].tolist()
        return gaps

    assert max(gaps_s(NO_HINTS)) > 0.12
    assert max(gaps_s(Hints(tpot_slo_ms=90.0))) < 0.095  # whoever joins the batch makes it longer


@pytest.mark.parametrize("engine", [ENGINE, MIXED], ids=["unmixed", "mixed"])
@pytest.mark.parametrize("policy", ["fcfs", "sage"])
def test_tokens_on_time_are_counted_in_a_leap_as_one_by_one(engine: Engine, policy: str) -> None:
    requests = traffic(60, 1, CLASSES)
    leaping = simulate(engine, policy, CONFIG, requests, Options(watch=watch))
    finished: list[Progress] = []
    node = make_node(engine, policy, CONFIG, Options(), finished.append)
    for index, request in enumerate(requests):
        node.submit(request, index)
    ages: dict[int, int] = {}
    on_time = [0] * len(requests)
    while len(finished) < len(requests):
        coming = min((r.arrival_s for r in requests if r.arrival_s > node.now_s), default=math.inf)
        idle = not (node.state.decode or node.state.queue or node.state.chunked)
        node.advance((coming if idle else node.now_s) + 1e-9)  # a step at a time
        for progress in node.state.decode:
            node.state.decode.sync(progress)
        for progress in {*node.state.decode, *finished}:
            before, age = ages.get(progress.index, 0), progress.generated_tokens
            ages[progress.index] = age
            if age <= max(before, 1):
                continue
            assert age == before + 1
            came_s = progress.request.arrival_s
            promise = Promise.of(progress.request.hints)
            due_s = came_s + promise.due_s(age)
            on_time[progress.index] += node.now_s <= due_s
    expected = [n if r.hints.has_slo else 0 for n, r in zip(on_time, requests, strict=True)]
    assert [p.num_next_on_time for p in sorted(finished, key=lambda p: p.index)] == expected
    # In a leap a token that is due as it comes may go either way.
    assert np.abs(leaping.num_next_on_time - expected).max() <= 1


def test_those_that_run_decode_beside_a_prefill() -> None:
    def alone(arrival_s: float, input_tokens: int, output_tokens: int) -> SimRequest:
        return SimRequest(arrival_s, input_tokens, output_tokens, 300, None, "")

    requests = [alone(0.0, 100, 50), alone(0.2, 200, 2)]
    mixed = simulate(MIXED, "fcfs", CONFIG, requests, Options(watch=watch))
    apart = simulate(ENGINE, "fcfs", CONFIG, requests, Options(watch=watch))
    step_time = ENGINE.step_time
    prefill_s = step_time.prefill_s(1, 200, attended_pairs(0, 200))
    # The step that prefills the second request: it reads the weights once.
    saved_s = prefill_s - (
        step_time.mixed_s(1, 200, attended_pairs(0, 200), 1, 106) - step_time.decode_s(1, 106)
    )
    assert saved_s == pytest.approx(0.02)
    assert apart.ttlt_s[0] - mixed.ttlt_s[0] == pytest.approx(saved_s, abs=1e-6)


@pytest.mark.parametrize("engine", [ENGINE, MIXED], ids=["unmixed", "mixed"])
@pytest.mark.parametrize("policy", ["proserve", "proserve-expected"])
def test_without_promises_it_is_sage_without_a_ttft_target(engine: Engine, policy: str) -> None:
    requests = traffic(80, 2, [NO_HINTS])
    options = Options(preempt=True, watch=watch)
    ours = simulate(engine, policy, CONFIG, requests, options)
    no_target = SageConfig(policy={"sage": SageParameters(ttft_ms=math.inf)})
    sage = simulate(engine, "sage", no_target, requests, options)
    assert ours.ttlt_s.tolist() == sage.ttlt_s.tolist()
    assert ours.num_yields.tolist() == sage.num_yields.tolist()
    assert sage.attainment() == {}


def crowd(hints: Sequence[Hints], seed: int = 3) -> list[SimRequest]:
    """Twice as much as can be served."""
    requests = traffic(150, seed, hints)
    return [replace(request, arrival_s=request.arrival_s / 4) for request in requests]


def test_under_overload_weight_and_deadlines_count() -> None:
    requests = crowd(CLASSES[:2])
    options = Options(preempt=True, watch=watch)
    ours = simulate(MIXED, "proserve-expected", CONFIG, requests, options).attainment()
    fcfs = simulate(MIXED, "fcfs", CONFIG, requests, options).attainment()
    assert ours["tdg_ratio"] > 1.5 * fcfs["tdg_ratio"]
    assert ours["tdg_ratio_by_class"]["high"] > ours["tdg_ratio_by_class"]["low"]


def attained_if_told_steps_are(shorter: float) -> float:
    """TDG of a crowd, if steps take so many times as long as the view says."""
    requests, finished = crowd(CLASSES[:2]), list[Progress]()
    options = Options(preempt=True)
    node = make_node(MIXED, "proserve-expected", CONFIG, options, finished.append)
    told = {name: s / shorter for name, s in asdict(node.state.server.step_time).items()}
    node.state.server = replace(node.state.server, step_time=StepTime(**told))
    for index, request in enumerate(requests):
        node.submit(request, index)
    node.advance(math.inf)
    ratio: float = result_of(MIXED, requests, finished, [node], 0.0).attainment()["tdg_ratio"]
    return ratio


def test_steps_longer_than_they_were_said_to_be_cost_little() -> None:
    assert attained_if_told_steps_are(1.3) > 0.9 * attained_if_told_steps_are(1.0)


@pytest.mark.slow
def test_an_impossible_deadline_costs_the_others_nothing() -> None:
    """Over several crowds: in one alone a few requests decide what a class attains."""
    impossible = replace(CLASSES[1], ttft_slo_ms=0.001, tpot_slo_ms=0.001, slo_class="mad")
    options = Options(preempt=True)
    attained, without = [], []
    for seed in range(12):
        requests = crowd(CLASSES[:2], seed)
        # One in ten asks for what cannot be.
        mad = [replace(r, hints=impossible) if i % 10 == 0 else r for i, r in enumerate(requests)]
        with_them = simulate(MIXED, "proserve-expected", CONFIG, mad, options)
        assert (with_them.ttlt_s < math.inf).all()  # served all the same
        alone = simulate(MIXED, "proserve-expected", CONFIG, requests, options)
        by_class, others = (
            found.attainment()["tdg_ratio_by_class"] for found in (with_them, alone)
        )
        assert by_class["mad"] < 0.2
        attained += [by_class["high"], by_class["low"]]
        without += [others["high"], others["low"]]
    assert np.mean(attained) > 0.97 * np.mean(without)


# Of an H800 with Qwen3-32B; and the classes of docs/policies.md.
FIXED_S = 0.041
DOCS = (
    Hints(weight=2.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="interactive"),
    Hints(ttft_slo_ms=5000.0, tpot_slo_ms=200.0, slo_class="default"),
)


def chat(rate: float, classes: Sequence[Hints]) -> list[SimRequest]:
    rng = np.random.default_rng(3)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, 200))
    return [
        replace(one, arrival_s=float(arrival_s), input_tokens=one.input_tokens + 600)
        for one, arrival_s in zip(traffic(200, 3, classes), arrivals_s, strict=True)
    ]


def unmixed(fixed_s: float) -> Engine:
    """Its prefills and decode steps take fixed_s beside what is in them."""
    step_time = StepTime(fixed_s, 0.0, fixed_s / 230, 0.0, fixed_s, 0.0, fixed_s / 250_000)
    return Engine(step_time, kv_pool_tokens=100_000, max_running_requests=64, swap_token_s=1e-6)


@pytest.mark.parametrize("policy", ["sage", "urgency", "fcfs-fill", "proserve"])
def test_promises_leave_the_server_its_throughput(policy: str) -> None:
    """A prefill in short pieces takes several times as long."""
    requests = chat(2.0, DOCS)
    kept = {
        name: simulate(unmixed(FIXED_S), name, CONFIG, requests).attainment()["slo_attainment"]
        for name in ("fcfs", policy)
    }
    assert kept["fcfs"] > 0.9
    assert kept[policy] >= kept["fcfs"] - 0.02


def test_an_impossible_promise_hardly_delays_first_tokens() -> None:
    hopeless = [Hints(tpot_slo_ms=0.001), *[NO_HINTS] * 19]
    ttft_s = [
        simulate(unmixed(FIXED_S), "sage", CONFIG, chat(2.0, hints)).ttft_s.mean()
        for hints in (hopeless, [NO_HINTS])
    ]
    assert ttft_s[0] < 1.25 * ttft_s[1]


@pytest.mark.parametrize("fixed_s", [0.35, 0.7])
def test_the_default_bound_on_gaps_suits_slow_servers(fixed_s: float) -> None:
    requests = chat(0.02 / fixed_s, [NO_HINTS])
    ttft_s = [
        simulate(unmixed(fixed_s), "sage", SageConfig(decode=bound), requests).ttft_s.mean()
        for bound in (DecodeConfig(), DecodeConfig(max_gap_ms=math.inf))
    ]
    assert ttft_s[0] < 1.1 * ttft_s[1]
