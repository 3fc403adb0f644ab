"""The order that ends a batch early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.app.config import SageConfig
from tests.sage_sched.situations import Story, decided
from tests.sage_sched.strategies import IDLE, job, named

RUN = "run " + " ".join(f"{n}:100%200" for n in range(20))
WAIT = "wait " + " ".join(f"{n}:100%200" for n in range(20, 40))


@pytest.mark.parametrize(
    ("situation", "plan"),
    [
        # Jobs that may be long start first. A fixed length needs no prediction.
        ("wait 2:100%50 0:100%300 1:100%50x19,2000", "+1 +0 +2"),
        ("wait 0:100<3000f 1:100%50", "+0 +1"),
        # When memory runs out, a job near its end leaves first.
        ("run 0:100%1000<1000+990 1:100%50x99,3000+990 2:100%60<60; short", "-0"),
        ("run 0:100%300 1:3000%300 2:200%300; short", "-1"),
        # A job may exceed all lengths as far as the longest exceeds most.
        ("run 0:100%100x95,600x5+600 1:100%100x5,600x95+600; short", "-1"),
        ("run 1:100%100x95,600x5+600 0:100%100x5,600x95+600; short", "-0"),
    ],
)
def test_jobs_that_may_end_last_go_first(situation: str, plan: str) -> None:
    assert decided(situation, "makespan") == plan


@pytest.mark.parametrize(
    ("facts", "starts"),
    [
        (f"{WAIT}; slots 1", False),
        (f"{WAIT}; slots 12", True),
        (f"{WAIT.replace('20:100', '20:100@-1')}; slots 1", True),
        (f"{WAIT.replace('20:100', '20:100!')}; slots 1", True),
        (f"{WAIT} 50:100%200~+5; slots 1", True),
        (f"{WAIT}; chunk 50:9000%200/512; slots 1", True),
    ],
)
def test_starts_wait_for_several_slots(facts: str, starts: bool) -> None:
    assert ("decode-only" in decided(f"{RUN}; {facts}", "makespan")) is not starts


def test_swapped_out_jobs_of_a_batch_wait_for_any_time() -> None:
    story = Story("makespan", SageConfig().limits(named("makespan")))
    for now_s in (0, 1, 1_000_000):
        story.plan(f"wait 0:100%1000~+5; now {now_s}; slots 0")
    assert not story.jobs[0].goes_first


@pytest.mark.parametrize("num_going_on", [0, 1])
def test_a_batch_that_is_aborted_leaves_nothing_behind(num_going_on: int) -> None:
    """However many of its requests had come, and though another request goes on."""
    others = [job(n, 100, lengths=(4000,)) for n in range(2000)]
    story = Story("makespan")
    for one in (*others, *(job(2000 + n, 100, lengths=(20,)) for n in range(num_going_on))):
        story.policy.on_arrival(one)
    for one in others[:100]:
        one.grow(640)
    story.policy.on_pass(replace(IDLE, running=others[:100]))
    for one in others:
        story.policy.on_end(one, 0.0)
    assert story.plan("wait 3000:100%300 3001:100%50x19,2000") == "+3001 +3000"
