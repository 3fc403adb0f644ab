"""Deadlines in the simulator: tokens on time, mixed steps, slices, ProServe, overload, sage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig
from sage_sched.job import NO_HINTS, Hints
from sage_sched.policies.sage import SageParameters
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, mixed, request

ENGINE = Engine(
    step_time=StepTime(0.02, 0.0, 2e-4, 1e-9, 0.03, 1e-4, 2e-6),
    kv_pool_tokens=4000,
    max_running_requests=16,
    chunked_prefill_size=256,
    swap_token_s=1e-6,
)
MIXED = replace(ENGINE, mixed_chunk=True)
SHORT_STEPS = replace(ENGINE, step_time=StepTime(0.004, 0.0, 2e-4, 1e-9, 0.006, 1e-5, 2e-7))
CLASSES = (
    Hints(weight=2.0, ttft_slo_ms=500.0, tpot_slo_ms=45.0, slo_class="high"),
    Hints(weight=1.0, ttft_slo_ms=2000.0, tpot_slo_ms=60.0, slo_class="low"),
)


def traffic(
    num_requests: int, seed: int, classes: Sequence[Hints], rate: float = 1 / 0.15, more: int = 0
) -> list[SimRequest]:
    """Return requests. more: tokens that each prompt has in addition to up to 600."""
    rng = np.random.default_rng(seed)
    requests = []
    for arrival_s in np.cumsum(rng.exponential(1 / rate, num_requests)):
        input_tokens = more + int(rng.integers(5, 600))
        length = int(rng.integers(1, 200))
        said = known(max(1, length // 2), length, 300)
        hints = classes[int(rng.integers(len(classes)))]
        requests.append(
            request(float(arrival_s), input_tokens, length, 300, distribution=said, hints=hints)
        )
    return requests


@pytest.mark.parametrize("engine", [SHORT_STEPS, MIXED], ids=["unmixed, short steps", "mixed"])
def test_sage_keeps_a_tpot_slo_of_requests_that_stay(engine: Engine) -> None:
    whole = replace(engine, chunked_prefill_size=1024)

    def longest_gap_s(hints: Hints) -> float:
        found = simulate(whole, "sage", CONFIG, traffic(150, 5, [hints]))
        stayed = (found.num_preemptions == 0) & (found.num_retractions == 0)
        assert stayed.mean() > 0.1
        return float(found.longest_gap_s[stayed].max())

    assert longest_gap_s(NO_HINTS) > 0.12
    assert longest_gap_s(Hints(tpot_slo_ms=90.0)) < 0.095  # each newcomer makes the batch longer


@pytest.mark.parametrize("engine", [ENGINE, MIXED], ids=["unmixed", "mixed"])
@pytest.mark.parametrize("policy", ["proserve", "proserve-expected"])
def test_proserve_without_slos_is_sage_without_a_ttft_target(engine: Engine, policy: str) -> None:
    requests = traffic(80, 2, [NO_HINTS])
    ours = simulate(engine, policy, CONFIG, requests, CHECKED)
    no_target = SageConfig(policy={"sage": SageParameters(ttft_ms=math.inf)})
    sage = simulate(engine, "sage", no_target, requests, CHECKED)
    assert ours.ttlt_s.tolist() == sage.ttlt_s.tolist()
    assert sage.attainment() == {}


def test_under_overload_weights_and_deadlines_count() -> None:
    crowd = traffic(150, 3, CLASSES, rate=4 / 0.15)  # twice as much as can be served
    hopeless = replace(CLASSES[1], ttft_slo_ms=0.001, tpot_slo_ms=0.001, slo_class="hopeless")
    mad = [replace(r, hints=hopeless) if i % 10 == 0 else r for i, r in enumerate(crowd)]
    fcfs, ours, beside = (
        simulate(MIXED, policy, CONFIG, requests, CHECKED).attainment()
        for policy, requests in (
            ("fcfs", crowd),
            ("proserve-expected", crowd),
            ("proserve-expected", mad),
        )
    )
    assert ours["tdg_ratio"] > 1.5 * fcfs["tdg_ratio"]
    assert ours["tdg_ratio_by_class"]["high"] > ours["tdg_ratio_by_class"]["low"]
    assert beside["tdg_ratio_by_class"]["high"] > 0.9 * ours["tdg_ratio_by_class"]["high"]


# Of an H800 with Qwen3-32B; and the classes of docs/policies.md.
FIXED_S = 0.041
DOCS = (
    Hints(weight=2.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="interactive"),
    Hints(ttft_slo_ms=5000.0, tpot_slo_ms=200.0, slo_class="default"),
)


def chat(rate: float, classes: Sequence[Hints]) -> list[SimRequest]:
    return traffic(200, 3, classes, rate, more=600)


def unmixed(fixed_s: float) -> Engine:
    """Return an engine whose prefills and decode steps take at least fixed_s."""
    step_time = StepTime(fixed_s, 0.0, fixed_s / 230, 0.0, fixed_s, 0.0, fixed_s / 250_000)
    return Engine(step_time, kv_pool_tokens=100_000, max_running_requests=64, swap_token_s=1e-6)


@pytest.mark.parametrize("policy", ["sage", "urgency", "fcfs-fill", "proserve"])
def test_promises_leave_the_server_its_throughput(policy: str) -> None:
    """A prefill in short pieces takes several times as long."""
    fcfs, ours = (
        simulate(unmixed(FIXED_S), name, CONFIG, chat(2.0, DOCS)).attainment()["slo_attainment"]
        for name in ("fcfs", policy)
    )
    assert fcfs > 0.9
    assert ours >= fcfs - 0.02


DEADLINES = {"max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}
ON = SageConfig.parse({"overload": {"enabled": True, **DEADLINES}})


def protected_by(policy: str, config: SageConfig, requests: Sequence[SimRequest]) -> Result:
    return simulate(SMALL, policy, config, requests, CHECKED)


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_more_requests_are_good_beyond_capacity_and_none_is_refused_at_low_load(
    policy: str,
) -> None:
    requests = mixed(600, 9.0, 1)
    plain, protected = (protected_by(policy, config, requests) for config in (CONFIG, ON))
    shares = [result.good_share(1.0, 0.1) for result in (plain, protected)]
    assert 0 < protected.num_refused < 500
    assert shares[1] > shares[0] + 0.1
    assert shares[1] * len(protected.ttlt_s) > shares[0] * len(plain.ttlt_s)
    assert plain.num_refused == protected_by(policy, ON, mixed(300, 0.7, 2)).num_refused == 0


def test_refusals_end_with_the_predictor_and_with_the_overload() -> None:
    requests = mixed(900, 9.0, 6)
    phases = [
        requests[:300],
        [replace(each, distribution=None) for each in requests[300:600]],  # the predictor is dead
        requests[600:],
        [replace(each, arrival_s=5000.0) for each in mixed(2000, 1.0, 7)],
        [replace(each, arrival_s=each.arrival_s + 9000.0) for each in mixed(100, 0.7, 8)],
    ]
    result = protected_by("sage", ON, [*chain(*phases)])
    admitted = Counter(result.arrival_s.tolist())
    num_refused = [len(phase) - sum(admitted[at] for at in times_s(phase)) for phase in phases]
    assert min(num_refused[0], num_refused[2]) > 30
    assert 1000 < num_refused[3] < 2000
    assert num_refused[1] == num_refused[4] == 0


def times_s(phase: Sequence[SimRequest]) -> set[float]:
    return {each.arrival_s for each in phase}


# A prefill takes 0.1 s and 1 ms a token, a decode step 0.1 s.
SLICED = Engine(StepTime(0.1, 0.0, 0.001, 0.0, 0.1, 0.0, 0.0), 100_000, 8, slices=10)


def asked(at_s: float, urgency: int, input_tokens: int, output_tokens: int = 1) -> SimRequest:
    hints = Hints(urgency=urgency)
    return request(at_s, input_tokens, output_tokens, 8, distribution=known(2, 4), hints=hints)


def served(engine: Engine, *requests: SimRequest, policy: str = "qllm") -> Result:
    return simulate(engine, policy, CONFIG, requests, CHECKED)


LONG, SENSITIVE = asked(0.0, 3, 900), asked(0.25, 2, 100)  # 1 s, cut every 0.1 s


@pytest.mark.parametrize(
    ("engine", "first", "late", "waits_s"),
    [
        (SLICED, LONG, SENSITIVE, 0.05),
        (replace(SLICED, slices=1), LONG, SENSITIVE, 0.75),
        (SLICED, asked(0.0, 1, 900), SENSITIVE, 0.75),  # who is sensitive is not cut
        (SLICED, LONG, asked(0.25, 3, 100), 0.75),
        (SLICED, LONG, asked(0.25, 5, 100), 0.75),  # best effort does not pass
    ],
)
def test_a_newcomer_waits_for_the_next_cut(
    engine: Engine, first: SimRequest, late: SimRequest, waits_s: float
) -> None:
    result = served(engine, first, late)
    assert result.ttft_s[1] == pytest.approx(waits_s + 0.2)
    assert result.ttft_s[0] == pytest.approx(1.2 if waits_s < 0.1 else 1.0)


def test_one_step_a_cut_while_the_sensitive_decode() -> None:
    result = served(SLICED, LONG, asked(0.25, 2, 100, output_tokens=4))
    # At 0.3 its prefill and a step, at 0.7 and 0.9 a step after a slice each.
    assert result.ttlt_s[1] == pytest.approx(0.05 + 0.2 + 0.1 + 2 * (0.1 + 0.1))
    assert result.ttlt_s[0] == pytest.approx(1.0 + 0.2 + 3 * 0.1)


def test_a_cut_takes_its_time_and_other_policies_have_none() -> None:
    slow = replace(SLICED, slice_overhead_s=0.01)
    assert served(slow, LONG).ttft_s[0] == pytest.approx(1.0 + 9 * 0.01)
    assert served(slow, LONG, policy="urgency").ttft_s[0] == pytest.approx(1.0)
