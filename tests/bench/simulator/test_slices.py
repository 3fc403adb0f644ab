"""Prefills that give way in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from sage_sched.job import Hints
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import CHECKED, CONFIG, known, request

# A prefill takes 0.1 s and 1 ms a token, a decode step 0.1 s.
ENGINE = Engine(StepTime(0.1, 0.0, 0.001, 0.0, 0.1, 0.0, 0.0), 100_000, 8, slices=10)


def asked(at_s: float, urgency: int, input_tokens: int, output_tokens: int = 1) -> SimRequest:
    hints = Hints(urgency=urgency)
    return request(at_s, input_tokens, output_tokens, 8, distribution=known(2, 4), hints=hints)


def served(engine: Engine, *requests: SimRequest, policy: str = "qllm") -> Result:
    return simulate(engine, policy, CONFIG, requests, CHECKED)


LONG, SENSITIVE = asked(0.0, 3, 900), asked(0.25, 2, 100)  # 1 s, cut every 0.1 s


@pytest.mark.parametrize(
    ("engine", "first", "late", "waits_s"),
    [
        (ENGINE, LONG, SENSITIVE, 0.05),
        (replace(ENGINE, slices=1), LONG, SENSITIVE, 0.75),
        (ENGINE, asked(0.0, 1, 900), SENSITIVE, 0.75),  # who is sensitive is not cut
        (ENGINE, LONG, asked(0.25, 3, 100), 0.75),
        (ENGINE, LONG, asked(0.25, 5, 100), 0.75),  # best effort does not pass
    ],
)
def test_a_newcomer_waits_for_the_next_cut(
    engine: Engine, first: SimRequest, late: SimRequest, waits_s: float
) -> None:
    result = served(engine, first, late)
    assert result.ttft_s[1] == pytest.approx(waits_s + 0.2)
    assert result.ttft_s[0] == pytest.approx(1.2 if waits_s < 0.1 else 1.0)


def test_one_step_a_cut_while_the_sensitive_decode() -> None:
    result = served(ENGINE, LONG, asked(0.25, 2, 100, output_tokens=4))
    # At 0.3 its prefill and a step, at 0.7 and 0.9 a step after a slice each.
    assert result.ttlt_s[1] == pytest.approx(0.05 + 0.2 + 0.1 + 2 * (0.1 + 0.1))
    assert result.ttlt_s[0] == pytest.approx(1.0 + 0.2 + 3 * 0.1)


def test_a_cut_takes_its_time_and_other_policies_have_none() -> None:
    slow = replace(ENGINE, slice_overhead_s=0.01)
    assert served(slow, LONG).ttft_s[0] == pytest.approx(1.0 + 9 * 0.01)
    assert served(slow, LONG, policy="urgency").ttft_s[0] == pytest.approx(1.0)


def test_no_request_passes_without_a_slot_or_memory() -> None:
    one_slot = replace(ENGINE, max_running_requests=1)
    assert served(one_slot, LONG, SENSITIVE).ttft_s[1] == pytest.approx(0.95)
    narrow = replace(ENGINE, kv_pool_tokens=1005)
    assert served(narrow, LONG, asked(0.25, 2, 90)).ttft_s[1] > 0.75


@pytest.mark.parametrize(
    "field",
    [
        {"slices": 0},
        {"slice_overhead_s": -1.0},
        {"hicache_ratio": -1.0},
        {"hicache_write_policy": "back"},
    ],
)
def test_an_engine_that_cannot_be_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        replace(ENGINE, **field)  # type: ignore[arg-type]
