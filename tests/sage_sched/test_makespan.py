"""The order that ends a batch early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.app.config import SageConfig
from sage_sched.job import BEHIND
from tests.sage_sched.situations import Story, decided
from tests.sage_sched.strategies import IDLE, job, named

RUN = "run " + " ".join(f"{n}:100%200" for n in range(20))
WAIT = "wait " + " ".join(f"{n}:100%200" for n in range(20, 40))


@pytest.mark.parametrize(
    ("facts", "starts"),
    [
        (f"{WAIT}; slots 1", False),
        (f"{WAIT}; slots 12", True),
        (f"{WAIT.replace('20:100', '20:100@-1')}; slots 1", True),
        (f"{WAIT.replace('20:100', '20:100!')}; slots 1", True),
        (f"{WAIT} 50:100%200~+5; slots 1", True),
        (f"{WAIT}; chunk 50:9000%200/512; slots 1", True),
        (f"{RUN.replace('19:100', f'19:100@{BEHIND}')}; {WAIT}; slots 1", False),
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
