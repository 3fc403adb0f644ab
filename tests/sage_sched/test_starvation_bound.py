"""No job overtakes a job that has passed its starvation bound."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.presets import Engine
from sage_sched.app.config import SageConfig
from sage_sched.policies.sage import Sage, SageParameters
from tests.bench.simulator.fuzz import Case, run
from tests.sage_sched.crowd import ROOMY, STARVED, crowd, overtakings
from tests.sage_sched.strategies import IDLE, decide, job, named


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**9),
    regret=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
    engine=st.sampled_from([ROOMY, STARVED]),
    switches=st.sampled_from([{}, {}, {4.0: "sage"}]),
)
def test_the_bound_is_that_of_an_account_that_forgets_nothing_and_it_is_kept(
    seed: int, regret: float, engine: Engine, switches: dict[float, str]
) -> None:
    """The run fails if a job passes its starvation bound earlier or later than the work done says,
    or if another job is admitted before a job that has passed it."""
    config = SageConfig(policy={"sage": SageParameters(regret=regret)})
    requests = crowd(seed, (5, 40, 150) if engine is ROOMY else (150, 400))
    policy = "fcfs-fill" if switches else "sage"
    run(Case(engine, config, requests, True, policy, switches))


@pytest.mark.parametrize("engine", [ROOMY, STARVED])
def test_without_regret_no_job_overtakes_another(engine: Engine) -> None:
    policy = Sage(SageParameters(regret=0.0), engine.server_facts())
    pairs = overtakings(policy, crowd(1), engine)
    assert pairs
    assert all(admitted.arrival < waits.arrival for admitted, waits in pairs)


@pytest.mark.parametrize("name", ["sage", "proserve"])
def test_finished_jobs_behind_an_unfinished_one_are_not_kept(name: str) -> None:
    stays, *jobs = (job(n, 5, served=n, served_tokens=1) for n in range(1000))
    policy, alive = named(name, stays, *jobs), weakref.WeakSet(jobs)
    while jobs:
        policy.on_end(jobs.pop(), 0.0)
    assert len(alive) < 10
    policy.on_pass(replace(IDLE, served_tokens=1000, waiting=[stays]))
    assert not stays.goes_first


def test_a_job_that_is_ranked_again_keeps_its_account() -> None:
    first, later = (
        [job(n, 5) for n in range(4)],
        [job(n, 5, served_tokens=5) for n in range(4, 200)],
    )
    policy, stays = named("sage", *first), first[-1]
    policy.on_end(stays, 0.0)
    policy.on_arrival(stays)
    policy.on_pass(replace(IDLE, waiting=first))
    for one in later:
        policy.on_arrival(one)
        policy.on_end(one, 0.0)
    policy.on_pass(replace(IDLE, served_tokens=5 * len(later), waiting=first))
    assert stays.goes_first


def test_work_for_a_job_that_was_retracted_while_no_plan_was_made_counts() -> None:
    overtaken, other = (job(n, 100, 9000, lengths=(5000,)) for n in range(2))
    policy = named("sage", overtaken, other)
    none_leaves = replace(IDLE, can_swap=False, may_preempt=False, num_arrivals=2)
    decide(replace(none_leaves, waiting=[overtaken, other]), policy)
    other.served_tokens = 5000
    other.grow(4900)
    full = replace(none_leaves, served_tokens=5000, locked_tokens=1000, num_arrivals_planned=2)
    decide(replace(full, waiting=[overtaken], running=[other], batch_is_full=True), policy)
    assert not overtaken.goes_first
    decide(replace(full, waiting=[overtaken, other]), policy)
    assert overtaken.goes_first
