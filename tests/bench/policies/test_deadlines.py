"""ProServe's rivals by their defining cases, and its parts by what their absence makes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.policies.deadline_rivals import RIVALS
from bench.policies.variants import PARTS
from sage_sched.app.config import DecodeConfig, SageConfig
from sage_sched.job import Hints, Job
from sage_sched.order import serving_order
from sage_sched.plan import UNLIMITED
from sage_sched.policy import NoParameters, Policy
from sage_sched.slo import Proserve, ProserveParameters
from tests.sage_sched.slo.test_policy import MIXED, SOON
from tests.sage_sched.slo.test_policy import job as asked
from tests.sage_sched.strategies import SERVER, waiting

HIGH = Hints(weight=2.0, ttft_slo_ms=5000.0, tpot_slo_ms=100.0, slo_class="high")
LOW = Hints(weight=1.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="low")


def job(arrival: int, hints: Hints, grown: int = 0, served_tokens: int = 0) -> Job:
    return Job(
        arrival, 100, 100, None, 0, hints=hints, generated_tokens=grown, served_tokens=served_tokens
    )


def rival(name: str) -> Policy:
    return RIVALS[name](NoParameters(), SERVER)


@pytest.mark.parametrize(
    ("name", "served", "first"),
    [
        ("sarathi-fcfs", (0, 0), None),
        ("sarathi-priority", (0, 0), HIGH),
        ("edf", (0, 0), LOW),
        ("fairbatching", (0, 0), None),
        # The class that has had least for its weight: 150 over 2, against 100.
        ("weighted-vtc", (150, 100), HIGH),
        ("weighted-vtc", (250, 100), LOW),
    ],
)
def test_the_order_of_each(name: str, served: tuple[int, int], first: Hints | None) -> None:
    for waits in ((LOW, HIGH), (HIGH, LOW)):
        policy = rival(name)
        running = [job(0, HIGH, served_tokens=served[0]), job(1, LOW, served_tokens=served[1])]
        view = replace(
            waiting(*(job(2 + i, each) for i, each in enumerate(waits))), running=running
        )
        policy.on_pass(view)
        assert waits[serving_order(policy, view)[0]] == (first or waits[0])


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_have_no_gap_bound_for_a_tpot_slo(name: str) -> None:
    running = replace(waiting(), running=[job(0, HIGH)], pass_tokens=1 << 20)
    bound = SageConfig(decode=DecodeConfig(max_gap_ms=math.inf)).limits(rival(name)).gap
    assert bound.within(UNLIMITED, running) is UNLIMITED


def test_prefills_are_as_long_as_deadlines_allow() -> None:
    def tokens(name: str, *running: Job, now_s: float = 0.0, hints: Hints = LOW) -> int:
        view = replace(waiting(job(2, hints)), running=[*running], now_s=now_s)
        budget = rival(name).budget(view)
        return (budget and budget.prefill_tokens) or 0

    # Time before a deadline is slack.
    urgent = replace(HIGH, ttft_slo_ms=1000.0)
    ahead, on_time = job(0, urgent, grown=40), job(1, urgent, grown=2)
    much = tokens("fairbatching", ahead, now_s=1.0)
    assert much > 10 * tokens("fairbatching", ahead, on_time, now_s=1.15) > 0
    assert tokens("fairbatching") == 0
    # A full batch keeps its time per token.
    strict = replace(HIGH, tpot_slo_ms=60.0)
    assert tokens("sarathi-fcfs", hints=HIGH) > tokens("sarathi-fcfs", hints=strict) > 0
    assert tokens("sarathi-fcfs", hints=Hints()) == 0


LATER = replace(SOON, ttft_slo_ms=1500.0)


@pytest.mark.parametrize(
    ("name", "under_load", "idle", "bounds_batches"),
    [
        ("proserve", [1, 0], [0, 1], True),
        ("proserve-deadline", [0, 1], [0, 1], True),
        ("proserve-density", [1, 0], [1, 0], True),
        ("proserve-unaware", [1, 0], [0, 1], False),
    ],
)
def test_each_part_of_proserve_counts(
    name: str, under_load: list[int], idle: list[int], bounds_batches: bool
) -> None:
    for input_tokens, expected in ((900, under_load), (9, idle)):
        policy = PARTS.get(name, Proserve)(ProserveParameters(), MIXED)
        # The deadline of the first is earlier, and the second is shorter.
        jobs = [asked(0, input_tokens=input_tokens), asked(1, LATER, input_tokens=input_tokens - 5)]
        running = asked(2, age=1)
        assert all(map(policy.on_arrival, (*jobs, running)))
        view = waiting(*jobs)
        policy.on_pass(view)
        assert serving_order(policy, view) == expected
        view = replace(view, running=[running], pass_tokens=8192, now_s=0.9)
        policy.on_pass(view)
        assert (policy.budget(view) is not None) == bounds_batches
