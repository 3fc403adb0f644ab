"""Whether the last plan of a batch still stands."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest

from sage_sched.job import Job
from sage_sched.policy import FcfsFill, Policy
from sage_sched.scheduler import Scheduler
from tests.sage_sched.situations import Story, without_adapters
from tests.sage_sched.strategies import SERVER, job

# Twenty running jobs, and a waiting one that lacks memory.
RUNNING = [f"{number}:100<900+50" for number in range(20)]
SITUATION = f"run {' '.join(RUNNING)}; wait 20:500%300 21:9%300; free 300; come 22"


def lacks(core: Scheduler, room_tokens: int) -> bool:
    return core.first_lacks_memory(core.num_arrivals, room_tokens)


def planned(policy: str | type[Policy] = "fcfs-fill", situation: str = SITUATION) -> Story:
    """Return a server that has just planned this situation. No job has an adapter."""
    story = without_adapters(Story(policy), situation)
    story.core.num_arrivals = story.core.last_plan.num_arrivals = 22
    return story


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_a_batch_is_full_until_the_first_job_has_enough_memory(num_ended: int) -> None:
    story = planned()
    for number in range(num_ended):
        story.core.ended(story.jobs[number])
    assert lacks(story.core, 300)
    free = 300
    while lacks(story.core, free):
        free += 1

    def plan(free_tokens: int) -> str:
        rest = f"run {' '.join(RUNNING[num_ended:])}; wait 20:500%300 21:9%300; come 22"
        return Story("fcfs-fill").plan(f"{rest}; free {free_tokens}")

    assert plan(free - 1).startswith("20 21")
    # It is admitted then or soon after: fewer jobs have a larger headroom each.
    assert plan(free + 50 * num_ended).startswith("+20")


def arrives(core: Scheduler, **about: object) -> None:
    core.arrived(job(22, 9, lengths=(300,), **about))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "event", "still_lacks"),
    [
        ("sage", lambda core, jobs: None, True),
        # It is held, or may be the first of the order.
        ("sage", lambda core, jobs: arrives(core), True),
        ("sage", lambda core, jobs: arrives(core, keeps_memory=True), False),
        ("fcfs-fill", lambda core, jobs: arrives(core), False),
        # The first job was aborted, or another may be the first now.
        ("sage", lambda core, jobs: core.ended(jobs[20]), False),
        ("sage", lambda core, jobs: core.refined([jobs[21]]), False),
        ("sage", lambda core, jobs: core.updated(SERVER), False),
        ("sage", lambda core, jobs: core.plan_again(), False),
    ],
)
def test_it_is_planned_if_another_job_may_be_the_first(
    policy: str, event: Callable[..., None], still_lacks: bool
) -> None:
    story = planned(policy, SITUATION.replace("500%300", "500%3"))
    event(story.core, story.jobs)
    assert lacks(story.core, 300) is still_lacks


def test_a_later_plan_of_the_full_batch_keeps_what_the_first_job_needs() -> None:
    story = planned()
    story.plan(f"{SITUATION}; full")
    assert lacks(story.core, 300)
    story.plan(f"{SITUATION.replace('wait 20', 'wait 19:9! 20')}; full")
    assert not lacks(story.core, 300)


def test_a_job_that_is_admitted_no_longer_lacks_memory() -> None:
    story = planned()
    assert story.plan(SITUATION.replace("free 300", "free 9000")).startswith("+20")
    assert not lacks(story.core, 300)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_job_that_joins_the_queue_late_is_planned(is_new: bool) -> None:
    """Its grammar was compiled after it had come."""
    core = planned("sage").core
    core.arrived(newcomer := job(22, 9, lengths=(300,)))
    if not is_new:
        core.may_have_changed(23, [], 1)
    core.last_plan.joins(newcomer)
    assert lacks(core, 300) is is_new


@pytest.mark.parametrize("situation", [f"{SITUATION}; slots 0", f"{SITUATION}; free 9000"])
def test_a_job_that_lacks_a_slot_or_nothing_does_not_lack_memory(situation: str) -> None:
    assert not lacks(planned(situation=situation).core, -math.inf)  # type: ignore[arg-type]


def test_memory_is_looked_at_again_after_an_eighth_of_the_jobs_has_ended() -> None:
    story = planned()
    for number in range(3):
        assert lacks(story.core, 300)
        story.core.ended(story.jobs[number])
    assert not lacks(story.core, 300)


@pytest.mark.parametrize(
    "situation",
    [
        # Its memory changes as others go on: a reserved answer, a prompt that is being chunked.
        SITUATION.replace("0:100<900+50", "0:100P<900+50"),
        f"{SITUATION}; chunk 19:3000/512",
        # It waits for another job's prefix.
        SITUATION.replace("20:500%300", "18:400%300 19:420%300 20:5000%300")
        + "; prefix 390 18 19; free 2400",
    ],
)
def test_memory_that_may_change_is_looked_at_after_each_end(situation: str) -> None:
    assert not lacks(planned(situation=situation).core, 300)


@pytest.mark.parametrize("policy", ["proserve", "tie"])
def test_an_order_that_moves_by_itself_is_looked_at_after_each_end(policy: str) -> None:
    assert not lacks(planned(policy).core, 300)


def test_a_server_that_shows_not_all_arrivals_plans_for_each() -> None:
    """A prefill server has not connected to all requests of a decode server."""
    core = planned().core
    core.arrived(job(22, 9))
    assert core.may_have_changed(22, [], 1)


def test_arrivals_that_no_plan_looks_at_are_not_kept() -> None:
    core, alive = planned().core, weakref.WeakSet[Job]()
    for number in range(22, 322):
        alive.add(newcomer := job(number, 9))
        core.arrived(newcomer)
        core.ended(newcomer)
        del newcomer
    assert len(alive) < 100


@pytest.mark.parametrize("answers", [{}, {22: None}, {22: math.nan}])
def test_if_the_policy_fails_a_new_job_is_planned_at_once(answers: dict[int, float]) -> None:
    class Fails(FcfsFill):
        def enters_full_at_s(self, job: Job) -> float:
            return answers[job.arrival]

    failed: list[str] = []
    story = planned(Fails)
    story.plan(f"{SITUATION}; full")
    core, story.core._on_failure = story.core, failed.append
    core.last_plan.num_arrivals = 22
    arrives(core)
    assert core.may_have_changed(23, [], 1)
    assert failed == ["plan a request"] * (math.nan not in answers.values())
