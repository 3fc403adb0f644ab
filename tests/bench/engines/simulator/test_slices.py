"""Prefills that give way in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.steps import StepTime
from tests.bench.engines.simulator.invariants import watch

# A prefill takes 0.1 s and 1 ms a token, a decode step 0.1 s.
ENGINE = Engine(StepTime(0.1, 0.0, 0.001, 0.0, 0.1, 0.0, 0.0), 100_000, 8, slices=10)
KNOWN = LengthDistribution.from_samples([2, 4], "history")


def request(at_s: float, urgency: int, input_tokens: int, output_tokens: int = 1) -> SimRequest:
    return SimRequest(at_s, input_tokens, output_tokens, 8, KNOWN, "", hints=Hints(urgency=urgency))


def served(engine: Engine, *requests: SimRequest, policy: str = "qllm") -> Result:
    options = Options(preempt=True, watch=watch)
    return simulate(engine, policy, SageConfig(), requests, options)


LONG = request(0.0, 3, 900)  # 1 s, cut every 0.1 s


@pytest.mark.parametrize(("engine", "waits_s"), [(ENGINE, 0.05), (replace(ENGINE, slices=1), 0.75)])
def test_who_comes_meanwhile_waits_for_the_next_cut(engine: Engine, waits_s: float) -> None:
    result = served(engine, LONG, request(0.25, 2, 100))
    assert result.ttft_s[1] == pytest.approx(waits_s + 0.2)
    assert result.ttft_s[0] == pytest.approx(1.2 if engine.slices > 1 else 1.0)


def test_one_step_a_cut_while_the_sensitive_decode() -> None:
    result = served(ENGINE, LONG, request(0.25, 2, 100, output_tokens=4))
    # At 0.3 its prefill and a step, at 0.7 and 0.9 a step after a slice each.
    assert result.ttlt_s[1] == pytest.approx(0.05 + 0.2 + 0.1 + 2 * (0.1 + 0.1))
    assert result.ttlt_s[0] == pytest.approx(1.0 + 0.2 + 3 * 0.1)


def test_a_cut_takes_its_time() -> None:
    result = served(replace(ENGINE, slice_overhead_s=0.01), LONG)
    assert result.ttft_s[0] == pytest.approx(1.0 + 9 * 0.01)


@pytest.mark.parametrize("late", [request(0.25, 3, 100), request(0.25, 5, 100)])
def test_best_effort_does_not_pass(late: SimRequest) -> None:
    assert served(ENGINE, LONG, late).ttft_s[1] == pytest.approx(0.75 + 0.2)


def test_the_sensitive_and_other_policies_are_not_cut() -> None:
    sensitive = replace(LONG, hints=Hints(urgency=1))
    assert served(ENGINE, sensitive, request(0.25, 2, 100)).ttft_s[1] == pytest.approx(0.95)
    assert served(ENGINE, LONG, request(0.25, 2, 100), policy="urgency").ttft_s[1] > 0.75


def test_nobody_passes_without_a_slot_or_memory_for_the_parked_ones_answer() -> None:
    one_slot = replace(ENGINE, max_running_requests=1)
    assert served(one_slot, LONG, request(0.25, 2, 100)).ttft_s[1] == pytest.approx(0.95)
    narrow = replace(ENGINE, kv_pool_tokens=1005)
    assert served(narrow, LONG, request(0.25, 2, 90)).ttft_s[1] > 0.75


@pytest.mark.parametrize("field", [{"slices": 0}, {"slice_overhead_s": -1.0}])
def test_what_cannot_be_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        replace(ENGINE, **field)  # type: ignore[arg-type]
