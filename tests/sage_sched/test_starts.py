"""Starts of waiting requests under sage."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.policy import Policy
from tests.sage_sched.situations import ByInput, Story, without_adapters
from tests.sage_sched.strategies import SERVER, job

# Ten running requests with long answers on ten slots, and a swapped one.
RUN = "run " + " ".join(f"{n}:100%2000+201=200" for n in range(10)) + "; full; free 9000; pass 8192"
FULL = f"{RUN}; wait 10:100%400~+100"


def server(ttft_ms: float = 2000.0) -> Story:
    return Story("sage", ttft_ms=ttft_ms, regret=math.inf)


@pytest.mark.parametrize(
    ("newcomers", "plan", "is_held"),
    [
        ("11:100%5", "10 11", True),
        ("11:100%5 12:100%4000", "10 11 12", True),
        # Its answer keeps its memory, it goes first, or it needs no prefill.
        ("11:100%5k", "11 10", False),
        ("11:100%5!", "-9 +11 10", False),
        ("11:100%5; cached 11 100", "11 10", False),
        # Its prompt takes longer than the target, cached or not.
        ("11:12000%5", "10 11", False),
        # Its prompt is too long to share a step. Most of it is cached.
        ("11:2000%5", "11 10", False),
        ("11:2000%5; cached 11 1900", "10 11", True),
        # Running requests may not leave.
        ("11:100%5; nopreempt", "11 10", False),
    ],
)
def test_new_requests_are_held_behind_others(newcomers: str, plan: str, is_held: bool) -> None:
    story = server()
    for _ in range(2):  # the first plan looks up cached tokens
        found = story.plan(f"{FULL} {newcomers}")
    assert (found, story.core.last_plan.next.at_s < 2.0) == (plan, is_held)


def test_requests_start_together_as_soon_as_waiting_costs_more_than_a_prefill_step() -> None:
    story = server()
    assert story.plan(f"{FULL} 11:100%400") == "10 11"
    due_s = story.core.last_plan.next.at_s
    # A step delays ten answers of 2000 tokens, waiting delays one of 400.
    assert due_s == pytest.approx(10 / 2000 * 400 * SERVER.step_time.prefill_base_s, rel=0.01)
    half_s = due_s / 2
    queue = f"{FULL} 11:100%400 12:100%400a{1000 * half_s:.0f}"
    assert story.plan(f"{queue}; now {half_s}") == "10 11 12"
    # The more requests wait, the sooner they start.
    assert half_s < story.core.last_plan.next.at_s < due_s
    assert story.plan(f"{queue}; now {due_s}; planned") == "-9 +11 -8 +12 10"


def test_a_request_is_held_no_longer_than_its_own_deadline() -> None:
    held_until_s = []
    for deadline_s in (math.inf, 0.5):
        story = server()
        story.plan(f"{FULL} 11:100%5000")
        story.jobs[11].ttft_s = deadline_s
        assert story.plan(f"{FULL} 11:100%5000") == "10 11"
        held_until_s.append(story.core.last_plan.next.at_s)
    assert held_until_s[0] > 0.5 > held_until_s[1] > 0.2


@pytest.mark.parametrize(
    ("now_s", "facts", "plan"),
    [
        (1.5, "", "-9 +11 10"),  # a running one's index exceeds the price
        (1.5, "; move 500000", "11 10"),  # a move of seconds
        (1.5, "; slots 3", "+11 10"),
        (2.5, "", "10 11"),  # it is late, and its index sets its place
    ],
)
def test_a_start_is_worth_what_it_costs(now_s: float, facts: str, plan: str) -> None:
    story = server()
    story.plan(f"{FULL} 11:100%400{facts}")
    assert story.plan(f"{FULL} 11:100%400; now {now_s}{facts}; planned") == plan


def test_running_requests_yield_to_a_promised_one_at_any_price() -> None:
    story, late = server(), "11:100%4000!a-100000; move 500000"
    assert story.plan(f"{FULL} {late}") == "-9 +11 10"
    # No job with a TPOT target or a promise is preempted.
    kept = RUN.replace("=200", "p50", 5).replace("=200", "=200!")
    assert story.plan(f"{kept}; wait {late}") == "11"


def arrives(story: Story, newcomer: Job, now_s: float) -> bool:
    """Return whether a full batch, whose plan has been made, is planned when this job comes."""
    core, number = story.core, newcomer.arrival
    core.now_s, core.num_arrivals, core.last_plan.num_arrivals = now_s, number, number
    core.arrived(newcomer)
    return core.may_have_changed(number + 1, [200] * 10, 1)


def test_an_arrival_is_planned_when_it_may_start_and_not_before() -> None:
    story = without_adapters(server(), f"{FULL} 11:100%400")
    due_s = story.core.last_plan.next.at_s
    half_s = due_s / 2
    assert not arrives(story, job(12, 100, lengths=(400,), arrival_s=half_s), half_s)
    at_s = story.core.last_plan.next.at_s
    assert half_s < at_s < due_s
    # The plan that looks at it finds the same time.
    story.plan(f"{FULL} 11:100%400 12:100%400a{1e3 * half_s:.0f}; now {half_s}")
    assert story.core.last_plan.next.at_s == pytest.approx(at_s, rel=1e-3)


@pytest.mark.parametrize(
    ("about", "is_planned"),
    [
        ({}, False),
        # It starts by its index alone.
        ({"keeps_memory": True}, False),
        # It may preempt others, or its prompt may be cached.
        ({"level": -1}, True),
        ({"goes_first": True}, True),
        ({"input_tokens": 12_000}, True),
    ],
)
def test_an_arrival_that_may_enter_at_once_is_planned_at_once(
    about: dict[str, Any], is_planned: bool
) -> None:
    story = without_adapters(server(), f"{FULL} 11:100%400")
    assert arrives(story, job(12, **{"input_tokens": 100, "lengths": (400,), **about}), 0.01) is (
        is_planned
    )


@pytest.mark.parametrize(("policy", "is_planned"), [("fcfs-fill", False), (ByInput, True)])
def test_an_arrival_is_planned_at_once_if_the_policy_preempts(
    policy: str | type[Policy], is_planned: bool
) -> None:
    situation = "run 0:100=5 1:100=5; wait 2:100<20; full"
    story = without_adapters(Story(policy, Limits()), situation)
    assert arrives(story, job(3, 100), 0.0) is is_planned
