"""The order of waiting and of running jobs, by levels, and after step times have been learned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.presets import H800_QWEN3_32B, PRESETS
from sage_sched.app.registry import policy_names
from sage_sched.distribution import UNKNOWN, LengthDistribution
from sage_sched.job import Job
from sage_sched.policies.sage import Sage
from sage_sched.preemption import retention_order
from sage_sched.scheduler import Scheduler
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import NUM_RANKED_ANEW
from tests.sage_sched.strategies import IDLE, core_of, distributions, named, waiting


@st.composite
def queues(draw: st.DrawFn, with_levels: bool = True) -> list[Job]:
    policy, queue, served = named("sage"), list[Job](), 0
    for arrival in range(draw(st.integers(0, 12))):
        served += draw(st.integers(0, 5000))
        lengths = draw(st.just(UNKNOWN) | distributions(max_size=5))
        one = Job(arrival, draw(st.integers(1, 2000)), 4096, lengths, served)
        one.grow(draw(st.sampled_from([0, 0, 150, 900])))
        if with_levels:
            one.level = draw(st.integers(-1, 1))
            one.goes_first = draw(st.booleans())
        policy.rank(one)
        queue.append(one)
    return draw(st.permutations(queue))


def served(queue: list[Job]) -> list[Job]:
    return [queue[position] for position in core_of(named("sage")).queue.order(waiting(*queue))]


@given(queues(with_levels=False))
def test_jobs_are_sorted_by_key_and_arrival(queue: list[Job]) -> None:
    order = served(queue)
    assert {*order} == {*queue}
    policy = named("sage")
    keys = [(policy.key(one, IDLE), one.arrival) for one in order]
    assert keys == sorted(keys)


@given(queues(), st.randoms())
def test_how_the_queue_was_ordered_before_does_not_matter(queue: list[Job], random: object) -> None:
    # It may differ between tensor-parallel ranks.
    assert served(sorted(queue, key=lambda one: hash((one.arrival, 7)) % 11)) == served(queue)


@given(queues())
def test_levels_come_first_and_the_order_within_a_level_stays(jobs: list[Job]) -> None:
    order = served(jobs)
    kept = [jobs[p] for p in retention_order(jobs, named("sage"), IDLE)]
    assert len(order) == len(kept) == len(jobs)
    for found in (order, kept):
        assert [one.level for one in found] == sorted(one.level for one in jobs)
    for level in (-1, 0, 1):
        alone = served([one for one in jobs if one.level == level])
        assert [one for one in order if one.level == level] == alone


BEFORE = H800_QWEN3_32B.server_facts()
AFTER = replace(BEFORE, step_time=PRESETS["a100-qwen1.5-7b"].step_time)


def jobs(core: Scheduler) -> list[Job]:
    """Return ranked jobs, every third of which has begun to answer."""
    rng, found = np.random.default_rng(0), list[Job]()
    for arrival in range(90):
        lengths = (rng.lognormal(4.5, 1.0) * rng.lognormal(0, 0.7, 32) + 1).astype(int)
        known = LengthDistribution.from_samples(lengths, "history")
        input_tokens = int(rng.lognormal(6.0, 1.2)) + 1
        job = Job(arrival, input_tokens, 4096, known, 0)
        core.arrived(job)
        job.grow(250 if arrival % 3 == 0 else 0)
        found.append(job)
    return found


def decided(core: Scheduler, among: list[Job]) -> Any:
    """Return all decisions that a policy's comparisons make."""
    policy = core.policy
    view: SchedulerView = replace(
        waiting(*among[:60]), running=among[60:], server=policy.server, num_arrivals=90
    )
    for _ in range(6):  # a plan ranks a part of 90 jobs, and makespan may rank all twice
        order = core.plan(replace(view)).order
    kept = retention_order(among[60:], policy, view)
    yields = [
        policy.key(job, view) > policy.key(among[0], view)
        and policy.should_preempt(job, among[0], 0.01, view)
        for job in among[60:]
    ]
    return order, kept, yields


@pytest.mark.parametrize("name", policy_names())
def test_all_are_ranked_as_if_it_had_been_known_from_the_start(name: str) -> None:
    core = core_of(named(name, server=BEFORE))
    among = jobs(core)
    before = decided(core, among)
    core.updated(AFTER)
    from_the_start = core_of(named(name, server=AFTER))
    after = decided(core, among)
    assert after == decided(from_the_start, jobs(from_the_start))
    assert name != "sage" or after != before


def test_a_job_is_ranked_anew_once_and_running_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    core, ranked = core_of(named("sage", server=BEFORE, ttft_ms=math.inf)), list[Job]()
    among = jobs(core)
    facts = {"running": among[1:20], "chunked": among[0], "num_arrivals": 90}
    view = replace(waiting(*among[20:]), **facts)  # type: ignore[arg-type]
    core.plan(view)
    core.updated(AFTER)
    monkeypatch.setattr(Sage, "rank", lambda self, job: ranked.append(job))
    order = core.plan(replace(view)).order
    first = [*among[1:20], among[0], *(view.waiting[position] for position in order)]
    assert ranked == first[:NUM_RANKED_ANEW]
    for _ in range(4):
        core.plan(replace(view))
    assert sorted(ranked, key=lambda job: job.arrival) == among


def test_a_policy_that_cannot_rank_anew_costs_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(named("sage", server=BEFORE))
    (job, *_) = jobs(core)
    core.updated(AFTER)
    monkeypatch.setattr(Sage, "rank", lambda self, job: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        core.plan(waiting(job))
    assert core.plan(waiting(job)).order == [0]
