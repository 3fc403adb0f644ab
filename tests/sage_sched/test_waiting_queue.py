"""The cost of a plan with a long queue, in touched jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sage_sched.distribution import LengthDistribution
from sage_sched.fair_shares import FairShares
from sage_sched.followed import HEAD, in_front
from sage_sched.job import Hints, Job
from sage_sched.limits import Limits
from sage_sched.policy import Policy
from sage_sched.waiting_queue import NUM_JOINING, NUM_RANKED_ANEW
from tests.sage_sched.situations import Story
from tests.sage_sched.strategies import IDLE, SERVER, core_of, named

TOUCHED: set[int] = set()
NUM_RUNNING = 20
LONG = 5 * HEAD
SOON = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0)
CASES = {
    **dict.fromkeys(("sage", "urgency", "qllm", "trail-prompt", "ltr", "fcfs-fill"), Hints()),
    **dict.fromkeys(("proserve", "proserve-expected"), SOON),
    "fair": Hints(tenant="t", slo_class="all", shares_fairly=True),
}


class Watched(Job):
    """A job that notes when it is touched."""

    def __getattribute__(self, name: str) -> Any:
        TOUCHED.add(id(self))
        return super().__getattribute__(name)


class Server:
    """A full server that makes and carries out plans, and admits none."""

    def __init__(self, name: str, num_waiting: int) -> None:
        self.hints = CASES[name]
        self.policy = named("sage" if name == "fair" else name)
        self.core = core_of(self.policy, Limits(fair_shares=FairShares()))
        self.rng = np.random.default_rng(0)
        self.num_come = 0
        running = [self.job() for _ in range(NUM_RUNNING)]
        for one in running:
            one.grow(50)
        self.view = replace(IDLE, running=running, room_tokens=0, locked_tokens=10_000)
        self.come(num_waiting)

    def job(self) -> Job:
        known = LengthDistribution.from_samples(self.rng.integers(1, 900, 8), "history")
        tenant = f"t{self.num_come % 50}" if self.hints.tenant else ""
        hints = replace(self.hints, urgency=1 + self.num_come % 5, tenant=tenant)
        job = Watched(self.num_come, 50, 1000, known, 0, hints=hints)
        self.core.arrived(job)
        self.num_come += 1
        return job

    def come(self, num_jobs: int) -> None:
        queue = [*self.view.waiting, *(self.job() for _ in range(num_jobs))]
        self.view = replace(self.view, waiting=queue, num_arrivals=self.num_come)

    def num_touched(self) -> int:
        """Return the number of jobs touched by a plan and by carrying it out."""
        TOUCHED.clear()
        plan = self.core.plan(self.view)
        queue = in_front(self.view.waiting, plan.order)
        num_touched = len(TOUCHED)
        self.view = replace(self.view, waiting=queue, served_tokens=self.view.served_tokens + 20)
        return num_touched

    def settle(self) -> None:
        for _ in range(2 + len(self.view.waiting) // NUM_JOINING):
            self.num_touched()


# The first of the order and of the queue, and jobs that run, join or are ranked anew.
MOST = 2 * HEAD + NUM_RUNNING + 2 * NUM_JOINING + NUM_RANKED_ANEW


@pytest.mark.parametrize("name", CASES)
def test_a_plan_touches_as_many_jobs_for_any_queue(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, num_keys = Server(name, LONG), 0
    key = type(server.policy).key

    def counted(self: Policy, *args: Any) -> float:
        nonlocal num_keys
        num_keys += 1
        return key(self, *args)

    # A burst joins the order gradually.
    monkeypatch.setattr(type(server.policy), "key", counted)
    for _ in range(3):
        num_keys = 0
        server.num_touched()
        assert num_keys <= MOST
    monkeypatch.undo()
    server.settle()
    assert all(job in server.core.queue for job in server.view.waiting)
    for num_come in (0, 1):
        server.come(num_come)
        assert server.num_touched() <= MOST
    faster = replace(SERVER.step_time, decode_base_s=SERVER.step_time.decode_base_s / 2)
    server.core.updated(replace(SERVER, step_time=faster))
    # The first plan notes the jobs to rank anew.
    server.num_touched()
    assert server.num_touched() <= MOST


def test_a_promised_job_goes_first_even_if_it_has_not_joined() -> None:
    story, last = Story("fcfs-fill"), 3 * NUM_JOINING
    queue = " ".join(f"{arrival}:1" for arrival in range(last))
    story.plan(f"wait {queue} {last}:1; slots 0")
    assert story.plan(f"wait {queue} {last}:1!; slots 0").startswith(f"{last} 0 1 ")


def test_a_place_behind_the_head_counts_all_that_go_before() -> None:
    story, places = Story("fcfs-fill"), dict[int, int]()
    queue = " ".join(f"{arrival}:1" for arrival in range(HEAD + 44))
    for _ in range(5):
        view = story.view(f"wait {queue}; slots 0")
        places |= {job.arrival: number for job, number in story.core.plan(view).places.items()}
    assert places[HEAD + 43] == HEAD + 43
