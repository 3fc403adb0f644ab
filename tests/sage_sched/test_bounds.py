"""Bounds of starvation, and of the time that swapped jobs are away."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.presets import Engine
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import POLICIES
from sage_sched.gaps import SwapOutBound
from sage_sched.job import Job
from sage_sched.limits import Limits
from sage_sched.policies.sage import SageParameters
from tests.bench.simulator.fuzz import Case, run
from tests.bench.simulator.traffic import MANY_SLOTS, SMALL, mixed
from tests.sage_sched.situations import Story, decided
from tests.sage_sched.strategies import job, named


@pytest.mark.slow
@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**9),
    regret=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
    engine=st.sampled_from([SMALL, replace(MANY_SLOTS, swap_token_s=0.0)]),
    switches=st.sampled_from([{}, {}, {4.0: "sage"}]),
)
def test_the_bound_is_that_of_an_account_that_forgets_nothing_and_it_is_kept(
    seed: int, regret: float, engine: Engine, switches: dict[float, str]
) -> None:
    """The run fails if a job passes its starvation bound earlier or later than the work done says,
    or if another job is admitted before a job that has passed it."""
    config = SageConfig(policy={"sage": SageParameters(regret=regret)})
    requests = mixed(80, 10.0, seed, unknown=0.1)
    policy = "fcfs-fill" if switches else "sage"
    run(Case(engine, config, requests, True, policy, switches))


@pytest.mark.parametrize("name", POLICIES)
def test_finished_jobs_behind_an_unfinished_one_are_not_kept(name: str) -> None:
    """No policy or limit keeps them, though each has waited, run, been swapped out, and been
    aborted while it waited."""
    policy = named(name)
    config = SageConfig.parse({"overload": {"enabled": policy.traits.predicts_waits}})
    story, alive = Story(name, config.limits(policy)), weakref.WeakSet[Job]()
    for number in range(1, 100):
        comes = f"{number}:5%9,40[c/t{number}]{'u1' * (number % 2)}{'d900p90' * (number % 3 > 0)}"
        story.plan(f"wait 0:5%9 {comes}; slots 0")
        for situation in (f"run {number}:5+1; wait 0:5", f"wait 0:5 {number}:5~+2", "wait 0:5"):
            story.plan(f"{situation}; slots 0; served {5 * number}")
        gone = story.jobs.pop(number)
        story.core.policy.on_end(gone, 0.0)
        for limit in story.core.limits.all:
            limit.ended(gone, 0.0)
        alive.add(gone)
        del gone
    assert len(alive) < 5


def test_work_for_a_job_that_was_retracted_while_no_plan_was_made_counts() -> None:
    story = Story("sage")
    story.plan("wait 0:100%5000<9000 1:100%5000<9000; noswap")
    full = "locked 1000; served 5000; come 2; noswap; full; planned"
    for situation, is_due in (("wait 0:100; run 1:100v5000+4900", False), ("wait 0:100 1:1", True)):
        story.plan(f"{situation}; {full.replace('full', 'slots 0' if is_due else 'full')}")
        assert story.jobs[0].goes_first is is_due


def test_a_full_batch_is_planned_anew_when_the_next_job_passes_its_bound() -> None:
    story = Story("sage")
    full = "wait 0:100%5000<9000; locked 1000; full"
    story.plan("wait 0:100%5000<9000 1:100%9<9000; come 2")
    story.plan(f"run 1:100v400+300; {full}; served 400; come 2")
    last = int(story.core.last_plan.next.at_tokens)
    for served, is_due in ((last, False), (last + 1, True)):
        story.plan(f"run 1:100v{served}+300; {full}; planned; served {served}; come 2")
        assert story.jobs[0].goes_first is is_due


RUN = "run 0:100<1000+5=105 1:100<1000+5=105 2:100<1000+5=105; full"
AWAY = [("wait 9:100~<1000+5 5:10; now 1", False), ("wait 9:100~ 5:10; now 2", False)]
DUE = [*AWAY, ("wait 9:100~ 5:10; now 61", False), ("wait 9:100~ 5:10; now 61.1", True)]


def away(most_s: float = 60.0) -> Story:
    return Story("fcfs-fill", Limits([SwapOutBound(most_s)]))


@pytest.mark.parametrize(
    "passes",
    [
        DUE,
        # It was aborted.
        [*DUE, ("wait 5:10; now 62", False)],
        # It has had a turn. A prompt that is chunked again has not left.
        [*DUE, ("run 9:100+68; wait 5:10", True), ("run 9:100+69; wait 5:10", False)],
        [*DUE, ("chunk 9:100+68; wait 5:10", True), ("chunk 9:100+69; wait 5:10", False)],
        # A new wait counts from zero.
        [*AWAY, ("run 9:100+6; wait 5:10; now 50", False), ("wait 9:100~ 5:10; now 70", False),
         ("wait 9:100~ 5:10; now 80", False), ("wait 9:100~ 5:10; now 129", False)],
        # It ran for less than a token.
        [*AWAY, ("run 9:100; wait 5:10; now 50", False), ("wait 9:100~ 5:10; now 61.1", True)],
        # Its other promise remains.
        [*AWAY, ("wait 9:100~! 5:10; now 62", True), ("run 9:100+90; wait 5:10; now 63", True)],
    ],
)  # fmt: skip
def test_a_job_that_was_away_for_too_long_is_due(passes: list[tuple[str, bool]]) -> None:
    story = away()
    for situation, is_due in passes:
        story.plan(situation)
        assert (story.jobs[9].goes_first, story.jobs[5].goes_first) == (is_due, False)


@pytest.mark.parametrize(
    ("most_s", "new", "plan"),
    [(10.0, "1:20", "-0 +1 9"), (0.1, "1:20", "1 9"), (0.1, "1:20!", "-0 +1 9")],
)
def test_jobs_whose_turns_would_take_too_long_keep_new_ones_out(
    most_s: float, new: str, plan: str
) -> None:
    story = Story(limits=Limits([SwapOutBound(most_s)]))
    assert story.plan(f"run 0:500; wait {new} 9:100~+5; full") == plan


def test_jobs_that_go_first_share_the_room_that_one_victim_frees() -> None:
    assert decided("run 0:500; wait 1:300~!+5 2:20~!+5 3:20; full; slots 1") == "-0 ^1 ^2 3"


def test_a_job_keeps_its_promises_under_another_policy() -> None:
    story = away()
    for situation, _ in DUE:
        story.plan(situation.replace("5:10", "8:100~<1000+5"))
    story.jobs[8].pass_starvation_bound()
    for one in story.jobs.values():
        one.revision, one.ranked_at, one.memo, one.starts_now = 3, 2, "other", True
        one.forget_policy()
    assert story.jobs[9].goes_first
    assert story.jobs[8].goes_first
    one = story.jobs[9]
    assert (one.revision, one.ranked_at, one.watch, one.memo, one.starts_now) == (
        0,
        0,
        None,
        None,
        False,
    )


def test_a_full_batch_is_planned_anew_when_the_next_job_has_been_away_for_too_long() -> None:
    story, by_s = away(), []
    for situation, _ in DUE:
        story.plan(f"{RUN}; {situation}")
        by_s.append(story.core.last_plan.next.at_s)
    assert by_s == [61.0, 61.0, 61.0, float("inf")]


def test_jobs_yield_to_a_due_one_even_if_the_policy_never_preempts() -> None:
    """The last jobs yield, as many as make room for the others' next steps."""
    story = away()
    for now_s, plan in ((1.0, "9"), (2.0, "9"), (61.0, "9"), (61.1, "-2 -1 ^9")):
        assert story.plan(f"{RUN}; wait 9:100~<1000+5; now {now_s}") == plan


def test_a_promise_of_another_swap_out_bound_ends_with_it() -> None:
    away, bound = job(0, age=5), SwapOutBound(60.0)
    away.pass_swap_out_bound(True)
    bound.arrived(away)
    assert not away.goes_first
