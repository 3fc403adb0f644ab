"""Time that swapped jobs are away."""

from __future__ import annotations

import pytest

from sage_sched.limits import Limits
from sage_sched.swap_out_bound import SwapOutBound
from tests.sage_sched.situations import Story

RUN = "run 0:100<1000+5=105 1:100<1000+5=105 2:100<1000+5=105; full"
# The clock may have stood still until the second look.
AWAY = [("wait 9:100~<1000+5 5:10; now 0", False), ("wait 9:100~ 5:10; now 1", False)]
DUE = [*AWAY, ("wait 9:100~ 5:10; now 61", False), ("wait 9:100~ 5:10; now 61.1", True)]


def away(most_s: float = 60.0) -> Story:
    return Story("fcfs-fill", Limits(swap_out=SwapOutBound(most_s)))


@pytest.mark.parametrize(
    "passes",
    [
        DUE,
        # It was aborted.
        [*DUE, ("wait 5:10; now 62", False)],
        # It has had a turn. A prompt that is chunked again has not left.
        [*DUE, ("run 9:100+68; wait 5:10", True), ("run 9:100+69; wait 5:10", False)],
        [*DUE, ("chunk 9:100+68; wait 5:10", True), ("chunk 9:100+69; wait 5:10", False)],
        # A new wait begins anew.
        [*AWAY, ("run 9:100; wait 5:10; now 50", False), ("wait 9:100~ 5:10; now 70", False),
         ("wait 9:100~ 5:10; now 80", False), ("wait 9:100~ 5:10; now 139", False)],
        # Its other promise is not taken back.
        [*AWAY, ("wait 9:100~! 5:10; now 62", True), ("run 9:100+90; wait 5:10; now 63", True)],
    ],
)  # fmt: skip
def test_a_job_that_was_away_for_too_long_is_due(passes: list[tuple[str, bool]]) -> None:
    story = away()
    for situation, is_due in passes:
        story.plan(situation)
        assert (story.jobs[9].goes_first, story.jobs[5].goes_first) == (is_due, False)


def test_a_job_that_meets_another_policy_keeps_its_other_promise_alone() -> None:
    story = away()
    for situation, _ in DUE:
        story.plan(situation.replace("5:10", "8:100~<1000+5"))
    story.jobs[8].pass_starvation_bound()
    for job in story.jobs.values():
        job.revision, job.ranked_at, job.memo, job.is_ranked = 3, 2, "other", False
        job.forget_policy()
    assert (story.jobs[9].goes_first, story.jobs[8].goes_first) == (False, True)
    job = story.jobs[9]
    assert (job.revision, job.ranked_at, job.watch, job.memo, job.is_ranked) == (
        0,
        0,
        None,
        None,
        True,
    )


@pytest.mark.parametrize(("most_s", "asks"), [(60.0, True), (float("inf"), False)])
def test_the_clock_is_asked_for_while_a_job_is_away(most_s: float, asks: bool) -> None:
    story = away(most_s)
    found = [story.limits.needs_clock]
    for situation in (f"{RUN}; wait 9:100~<1000+5; now 0", f"{RUN}; wait 5:10; now 1"):
        story.plan(situation)
        found.append(story.limits.needs_clock)
    assert found == [False, asks, False]


def test_others_yield_to_one_that_is_due_under_a_policy_whose_jobs_never_yield() -> None:
    """The last ones do, as many as leave room for the others' next steps."""
    story = away()
    for now_s, plan in ((0.0, "9"), (1.0, "9"), (61.0, "9"), (61.1, "-2 -1 ^9")):
        assert story.plan(f"{RUN}; wait 9:100~<1000+5; now {now_s}") == plan
