"""Whether the last plan of a batch still stands."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sage_sched.limits import Limits
from sage_sched.scheduler import Scheduler
from tests.sage_sched.situations import Story
from tests.sage_sched.strategies import SERVER, job

RUNNING = [f"{number}:100<900+50" for number in range(4)]
# Four running jobs, and a waiting one that lacks memory.
SITUATION = f"run {' '.join(RUNNING)}; wait 4:500%300 5:9%300; free 300; come 6"


def planned(policy: str = "fcfs-fill", situation: str = SITUATION) -> Story:
    """Return a server that has just planned this situation. No job has an adapter."""
    story = Story(policy)
    story.plan(situation)
    story.core.limits = Limits()
    story.plan(situation)
    story.core.num_arrivals = story.core.last_plan.num_arrivals = 6
    return story


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_a_batch_is_full_until_the_first_job_has_enough_memory(num_ended: int) -> None:
    story = planned()
    for number in range(num_ended):
        story.core.ended(story.jobs[number])
    assert story.core.lacks_memory(300)
    free = 300
    while story.core.lacks_memory(free):
        free += 1

    def plan(free_tokens: int) -> str:
        rest = f"run {' '.join(RUNNING[num_ended:])}; wait 4:500%300 5:9%300; come 6"
        return Story("fcfs-fill").plan(f"{rest}; free {free_tokens}")

    assert plan(free - 1).startswith("4 5")
    # It is admitted then or soon after: fewer jobs have a larger headroom each.
    assert plan(free + 50 * num_ended).startswith("+4")


def arrives(core: Scheduler, **about: object) -> None:
    core.arrived(job(6, 9, lengths=(300,), **about))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "event", "still_lacks"),
    [
        ("sage", lambda core, jobs: None, True),
        # It is held, or may be the first of the order.
        ("sage", lambda core, jobs: arrives(core), True),
        ("sage", lambda core, jobs: arrives(core, keeps_memory=True), False),
        ("fcfs-fill", lambda core, jobs: arrives(core), False),
        # The first job was aborted, or another may be the first now.
        ("sage", lambda core, jobs: core.ended(jobs[4]), False),
        ("sage", lambda core, jobs: core.refined([jobs[5]]), False),
        ("sage", lambda core, jobs: core.updated(SERVER), False),
        ("sage", lambda core, jobs: core.plan_again(), False),
    ],
)
def test_it_is_planned_if_another_job_may_be_the_first(
    policy: str, event: Callable[..., None], still_lacks: bool
) -> None:
    story = planned(policy, SITUATION.replace("500%300", "500%3"))
    event(story.core, story.jobs)
    assert story.core.lacks_memory(300) is still_lacks


def test_a_later_plan_of_the_full_batch_keeps_what_the_first_job_needs() -> None:
    story = planned()
    story.plan(f"{SITUATION}; full")
    assert story.core.lacks_memory(300)
    story.plan(f"{SITUATION.replace('wait 4', 'wait 3:9! 4')}; full")
    assert not story.core.lacks_memory(300)


@pytest.mark.parametrize("situation", [f"{SITUATION}; slots 0", f"{SITUATION}; free 9000"])
def test_a_job_that_lacks_a_slot_or_nothing_does_not_lack_memory(situation: str) -> None:
    assert not planned(situation=situation).core.lacks_memory(-math.inf)  # type: ignore[arg-type]
