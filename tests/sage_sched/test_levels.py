"""An operator's priorities: a job of a smaller level goes before all of a larger one."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sage_sched.job import Job
from sage_sched.order import retention_order, serving_order
from sage_sched.policies.sage import Sage, SageParameters
from sage_sched.policy import NoParameters
from sage_sched.view import SchedulerView
from tests.sage_sched.situations import ByInput
from tests.sage_sched.strategies import IDLE, SERVER, decide, distributions, job, waiting


@st.composite
def jobs_of_levels(draw: st.DrawFn) -> list[Job]:
    policy = Sage(SageParameters(regret=math.inf), SERVER)
    jobs = []
    for arrival in range(draw(st.integers(0, 12))):
        lengths = draw(st.none() | distributions(max_size=5))
        one = Job(arrival, 100, 4096, lengths, 0, level=draw(st.integers(-1, 1)))
        one.passed_starvation_bound = draw(st.booleans())
        one.is_ranked = policy.on_arrival(one)
        jobs.append(one)
    return draw(st.permutations(jobs))


@given(jobs_of_levels())
def test_the_order_is_by_level_and_within_a_level_what_it_would_be(jobs: list[Job]) -> None:
    policy = Sage(SageParameters(regret=math.inf), SERVER)
    served = [jobs[position] for position in serving_order(policy, waiting(*jobs))]
    kept = [jobs[p] for p in retention_order(jobs, range(len(jobs)), policy, IDLE)]
    assert len(served) == len(kept) == len(jobs)
    for order in (served, kept):
        assert [one.level for one in order] == sorted(one.level for one in jobs)
    for level in (-1, 0, 1):
        alike = [one for one in jobs if one.level == level]
        ranked = [one for one in served if one.level == level and one.is_ranked]
        alone = [alike[p] for p in serving_order(policy, waiting(*alike))]
        assert ranked == [one for one in alone if one.is_ranked]


def test_one_that_is_held_back_is_behind_all_levels() -> None:
    class HoldsBackLong(ByInput):
        def key(self, job: Job, view: SchedulerView) -> float:
            return math.inf if job.input_tokens > 50 else job.input_tokens

    first, last = job(0, 100, level=-1), job(1, 10, level=1)
    view = replace(waiting(first, last), running=[job(2, 20)])
    plan = decide(view, HoldsBackLong(NoParameters(), SERVER))
    assert [view.waiting[position] for position in plan.order or ()] == [last, first]
