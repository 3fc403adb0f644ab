"""Gaps between the tokens of running answers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from sage_sched.app.config import DecodeConfig, SageConfig
from sage_sched.gaps import Gap, percentile_s
from sage_sched.job import Hints, Job
from sage_sched.limit import Limit
from sage_sched.plan import UNLIMITED, Budget
from sage_sched.steps import StepTime
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import IDLE, SERVER, job, named

# A prefill step takes 10 ms and 1 ms a token, a decode step 20 ms.
STEPS = StepTime(0.010, 0.0, 0.001, 0.0, 0.020, 0.0, 0.0)
PASS_TOKENS = 4096


def runs(tpot_slo_ms: float | None = None, age: int = 5) -> Job:
    return job(0, 100, 1000, age=age, hints=Hints(tpot_slo_ms=tpot_slo_ms))


def view(*running: Job, steps: StepTime = STEPS, mixes_steps: bool = False) -> SchedulerView:
    server = replace(SERVER, step_time=steps, mixes_steps=mixes_steps)
    return replace(IDLE, running=running, server=server, pass_tokens=PASS_TOKENS)


def of_ms(max_gap_ms: float) -> Limit:
    return SageConfig(decode=DecodeConfig(max_gap_ms)).limits(named("sage")).bounds[1]


TPOT = runs(10_000.0), runs(230.0), runs()
SMALL, LARGE = Budget(prefill_tokens=100, chunk_tokens=50), Budget(3000, chunk_tokens=50)
PAIRS, CHUNKED = replace(STEPS, prefill_pair_s=1e-6), job(1, 9000, prefilled_tokens=1000)
SLOW_DECODE, SLOW_PREFILL = replace(STEPS, decode_base_s=0.2), replace(STEPS, prefill_base_s=0.1)


@pytest.mark.parametrize(
    ("gap", "given", "running", "found"),
    [
        (Gap(), UNLIMITED, view(runs()), UNLIMITED),
        (Gap(0.1), UNLIMITED, view(), UNLIMITED),
        (Gap(0.530), UNLIMITED, view(runs()), Budget(prefill_tokens=500)),  # and a decode step
        (Gap(0.530), SMALL, view(runs()), SMALL),
        (Gap(0.530), LARGE, view(runs()), replace(LARGE, prefill_tokens=500)),
        (Gap(0.001), UNLIMITED, replace(view(runs()), page_size=256), Budget(prefill_tokens=256)),
        # Each token of a chunk attends to a thousand before it: 2 ms, and 0.5 us more each.
        (Gap(0.530), UNLIMITED, replace(view(runs(), steps=PAIRS), chunked=CHUNKED),
         Budget(prefill_tokens=236)),
        # A promised TPOT is a bound too. Steps that are mixed take the 10 ms of both kinds once.
        (Gap(holds_tpot=True), UNLIMITED, view(*TPOT), Budget(prefill_tokens=200)),
        (Gap(holds_tpot=True), UNLIMITED, view(*TPOT, mixes_steps=True),
         Budget(prefill_tokens=210)),
        (Gap(0.2, holds_tpot=True), UNLIMITED, view(*TPOT), Budget(prefill_tokens=170)),
        (Gap(), UNLIMITED, view(*TPOT), UNLIMITED),
        # Steps of 200 ms cannot keep it. A cut costs 210 ms and may take a sixth of the time. With
        # mixed steps, it costs 200 ms and may take half of the time.
        (Gap(holds_tpot=True), UNLIMITED, view(runs(1.0), steps=SLOW_DECODE),
         Budget(prefill_tokens=1050)),
        (Gap(holds_tpot=True), UNLIMITED, view(runs(1.0), steps=SLOW_DECODE, mixes_steps=True),
         Budget(prefill_tokens=200)),
    ],
)  # fmt: skip
def test_a_budget_within_the_bound(
    gap: Gap, given: Budget, running: SchedulerView, found: Budget
) -> None:
    assert gap.within(given, running) == found


@pytest.mark.parametrize(
    ("gap", "steps", "passes"),
    [
        # Prefills add up until the next decode step. A prefill of 200 tokens takes 210 ms.
        (Gap(0.530), STEPS, [("", 500), ("prefill 200", 290), ("prefill 290", 0), ("decode", 500)]),
        # Under overlap tokens are seen a pass later, and this prefill counts for the next step.
        (Gap(0.530), STEPS, [("", 500), ("prefill 500", 0), ("decode prefill 300", 190)]),
        # Prefills delay no request if none runs, or if all have left since.
        (Gap(0.530), STEPS, [("idle", None), ("prefill 400", 500)]),
        (Gap(0.530), STEPS, [("", 500), ("prefill 400 idle", None), ("", 500)]),
        # One more prefill must be worth its fixed time.
        (Gap(1.0), SLOW_PREFILL, [("", 880), ("prefill 650", 130)]),
        (Gap(1.0), SLOW_PREFILL, [("", 880), ("prefill 700", 0)]),
        # Cuts take a limited share. A cut costs 320 ms and may take a sixth of the time, or half if
        # the operator wants shorter gaps than the default.
        (of_ms(1000.0), SLOW_PREFILL, [("", 880), ("prefill 880", 0)]),
        (of_ms(1000.0), replace(STEPS, prefill_base_s=0.3), [("", 1600), ("prefill 1600", 0)]),
        (of_ms(999.0), replace(STEPS, prefill_base_s=0.3), [("", 679), ("prefill 679", 0)]),
        (of_ms(1.0), replace(STEPS, prefill_base_s=0.3), [("", 320), ("prefill 320", 0)]),
    ],
)
def test_prefills_between_two_decode_steps_stay_within_the_bound(
    gap: Gap, steps: StepTime, passes: list[tuple[str, int | None]]
) -> None:
    for events, num_tokens in passes:
        for event in re.findall(r"decode|prefill \d+", events):
            if event == "decode":
                gap.decoded()
            else:
                gap.prefilled(1, int(event.split()[1]), 0.0)
        running = () if "idle" in events else (runs(),)
        found = gap.within(UNLIMITED, view(*running, steps=steps)).prefill_tokens
        assert found == (num_tokens and pytest.approx(num_tokens, abs=1))


def test_percentiles_of_gaps() -> None:
    gaps = Counter({10_000: 90, 50_000: 9, 70_000: 1})
    found = [percentile_s(gaps, percent) for percent in (0, 50, 90, 91, 99, 100)]
    assert found == [1.0, 1.0, 1.0, 5.0, 5.0, 7.0]
    assert percentile_s(Counter(), 50) == 0.0
