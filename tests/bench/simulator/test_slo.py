"""Deadlines, overload and slices of prefills in the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from sage_sched.app.config import SageConfig
from sage_sched.job import NO_HINTS, Hints
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, mixed, request


@pytest.mark.parametrize("is_mixed", [False, True])
def test_sage_keeps_a_tpot_slo_of_requests_that_stay(is_mixed: bool) -> None:
    step_time = StepTime(0.004, 0.0, 2e-4, 1e-9, 0.006, 1e-5, 2e-7)
    engine = Engine(step_time, 4000, 16, chunked_prefill_size=1024, mixed_chunk=is_mixed)

    def longest_gap_s(hints: Hints) -> float:
        requests = [replace(each, hints=hints) for each in mixed(150, 6.0, 5)]
        found = simulate(engine, "sage", CONFIG, requests)
        stayed = (found.num_preemptions == 0) & (found.num_retractions == 0)
        assert stayed.mean() > 0.1
        return float(found.longest_gap_s[stayed].max())

    assert longest_gap_s(NO_HINTS) > 0.12
    assert longest_gap_s(Hints(tpot_slo_ms=90.0)) < 0.095  # each newcomer makes the batch longer


DEADLINES = {"max_ttft_ms": 1000.0, "max_tpot_ms": 100.0}
ON = SageConfig.parse({"overload": {"enabled": True, **DEADLINES}})


@pytest.mark.parametrize("policy", ["sage", "fcfs-fill"])
def test_more_requests_are_good_beyond_capacity(policy: str) -> None:
    requests = mixed(600, 9.0, 1)
    plain, protected = (simulate(SMALL, policy, of, requests, CHECKED) for of in (CONFIG, ON))
    shares = [result.good_share(1.0, 0.1) for result in (plain, protected)]
    assert plain.num_refused == 0 < protected.num_refused < 500
    assert shares[1] > shares[0] + 0.1
    assert shares[1] * len(protected.ttlt_s) > shares[0] * len(plain.ttlt_s)


def test_refusals_end_with_the_predictor_and_with_the_overload() -> None:
    requests = mixed(900, 9.0, 6)
    phases = [
        requests[:300],
        [replace(each, distribution=None) for each in requests[300:600]],  # the predictor is dead
        requests[600:],
        [replace(each, arrival_s=5000.0) for each in mixed(2000, 1.0, 7)],
        [replace(each, arrival_s=each.arrival_s + 9000.0) for each in mixed(100, 0.7, 8)],
    ]
    admitted = {*simulate(SMALL, "sage", ON, [*chain(*phases)], CHECKED).arrival_s.tolist()}
    num_refused = [sum(each.arrival_s not in admitted for each in phase) for phase in phases]
    assert min(num_refused[0], num_refused[2]) > 30
    assert num_refused[1] == num_refused[4] == 0


def test_no_more_requests_wait_than_the_engine_allows() -> None:
    engine = replace(SMALL, max_running_requests=1, max_queued_requests=2)
    result = simulate(engine, "fcfs", CONFIG, [request(0.01 * i, 10, 50) for i in range(5)])
    assert (result.num_refused, len(result.ttlt_s)) == (2, 3)


# A prefill takes 0.1 s and 1 ms a token, a decode step 0.1 s.
SLICED = Engine(StepTime(0.1, 0.0, 0.001, 0.0, 0.1, 0.0, 0.0), 100_000, 8, slices=10)


def asked(at_s: float, urgency: int, input_tokens: int, output_tokens: int = 1) -> SimRequest:
    hints = Hints(urgency=urgency)
    return request(at_s, input_tokens, output_tokens, 8, distribution=known(2, 4), hints=hints)


LONG, SENSITIVE = asked(0.0, 3, 900), asked(0.25, 2, 100)  # 1 s, cut every 0.1 s


@pytest.mark.parametrize(
    ("engine", "first", "late", "waits_s"),
    [
        (SLICED, LONG, SENSITIVE, 0.05),
        (replace(SLICED, slices=1), LONG, SENSITIVE, 0.75),
        (SLICED, asked(0.0, 1, 900), SENSITIVE, 0.75),  # a sensitive prompt is not cut
        (SLICED, LONG, asked(0.25, 3, 100), 0.75),  # best effort does not pass
    ],
)
def test_a_newcomer_waits_for_the_next_cut(
    engine: Engine, first: SimRequest, late: SimRequest, waits_s: float
) -> None:
    result = simulate(engine, "qllm", CONFIG, [first, late], CHECKED)
    assert result.ttft_s == pytest.approx([1.2 if waits_s < 0.1 else 1.0, waits_s + 0.2])


def test_one_step_a_cut_while_the_sensitive_decode() -> None:
    slow = replace(SLICED, slice_overhead_s=0.01)
    late = asked(0.25, 2, 100, output_tokens=4)
    result = simulate(slow, "qllm", CONFIG, [LONG, late], CHECKED)
    # At 0.33 its prefill and a step, then a step after a slice each, and 10 ms a cut.
    assert result.ttlt_s[1] == pytest.approx(0.08 + 0.2 + 0.1 + 2 * (0.1 + 0.1 + 0.01))
    assert result.ttlt_s[0] == pytest.approx(1.0 + 0.2 + 3 * 0.1 + 9 * 0.01)
    assert simulate(slow, "urgency", CONFIG, [LONG]).ttft_s[0] == pytest.approx(1.0)
