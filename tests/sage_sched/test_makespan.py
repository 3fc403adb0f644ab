"""The order that ends a batch early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.order import retention_order, serving_order
from sage_sched.policy import Policy
from tests.sage_sched.strategies import IDLE, SERVER, waiting


def job(*lengths: int, arrival: int = 0, level: int = 0, cap: int = 4096) -> Job:
    """A job whose length is one of these, each as likely, known from many samples."""
    many = LengthDistribution.from_samples(list(lengths) * 1000, "history")
    return Job(arrival, 100, cap, many, 0, level=level)


def policy_with(*jobs: Job) -> Policy:
    policy = policy_named("makespan", {}, SERVER)
    for one in jobs:
        assert policy.on_arrival(one)
    return policy


def test_jobs_that_may_be_long_start_first() -> None:
    middling, gamble, short = job(300), job(*[50] * 19, 2000, arrival=1), job(50, arrival=2)
    jobs = [short, middling, gamble]
    policy, view = policy_with(*jobs), waiting(*jobs)
    policy.on_pass(view)
    assert serving_order(policy, view) == [2, 1, 0]


def test_when_memory_runs_out_a_job_near_its_end_leaves_first() -> None:
    near_its_end, outlived = job(1000, cap=1000), job(*[50] * 99, 3000, arrival=1)
    jobs = [near_its_end, outlived, job(60, arrival=2, cap=60)]
    policy = policy_with(*jobs)
    near_its_end.grow(990)
    outlived.grow(990)
    view = replace(IDLE, running=jobs)
    policy.on_pass(view)
    assert retention_order(jobs, range(3), policy, view) == [1, 2, 0]


@pytest.mark.parametrize(
    ("free_slots", "level", "starts"), [(1, 0, False), (12, 0, True), (1, -1, True)]
)
def test_starts_wait_for_several_slots(free_slots: int, level: int, starts: bool) -> None:
    running = [job(200, arrival=i, level=-(i == 0)) for i in range(20)]
    queue = [job(200, arrival=20 + i, level=level) for i in range(20)]
    policy = policy_with(*running, *queue)
    view = replace(waiting(*queue), running=running, free_slots=free_slots)
    policy.on_pass(view)
    serving_order(policy, view)
    budget = policy.budget(view)
    assert starts == (budget is None or budget.prefill_tokens != 0)


def test_a_fixed_length_needs_no_prediction() -> None:
    fixed = Job(0, 100, 3000, None, 0, has_fixed_length=True)
    short = job(50, arrival=1)
    policy, view = policy_with(short, fixed), waiting(short, fixed)
    policy.on_pass(view)
    assert serving_order(policy, view) == [1, 0]


def test_a_job_may_exceed_all_lengths_as_far_as_those_do_most() -> None:
    heavy_tailed, light_tailed = (
        job(*[100] * 95, *[600] * 5),
        job(*[100] * 5, *[600] * 95, arrival=1),
    )
    policy = policy_with(heavy_tailed, light_tailed)
    for one in (heavy_tailed, light_tailed):
        one.grow(600)
    view = replace(IDLE, running=[light_tailed, heavy_tailed])
    policy.on_pass(view)
    assert policy.key(heavy_tailed, view) < policy.key(light_tailed, view)


def test_swapped_out_jobs_of_a_batch_wait_for_any_time() -> None:
    policy, swapped = policy_with(), job(1000)
    swapped.grow(5)
    limits = SageConfig().limits(policy)
    for now_s in (0.0, 1.0, 1e6):
        limits.swap_out.check(replace(waiting(swapped), now_s=now_s), [swapped])
    assert not swapped.goes_first


@pytest.mark.parametrize("num_going_on", [0, 1])
def test_a_batch_that_is_aborted_leaves_nothing_behind(num_going_on: int) -> None:
    """However many of its requests had come, and though another request goes on."""
    others = [job(4000, arrival=i) for i in range(2000)]
    policy = policy_with(*others, *(job(20, arrival=2000 + i) for i in range(num_going_on)))
    for one in others[:100]:
        one.grow(640)
    policy.on_pass(replace(IDLE, running=others[:100]))
    for one in others:
        policy.on_end(one, 0.0)
    middling, gamble = job(300), job(*[50] * 19, 2000, arrival=1)
    for one in (middling, gamble):
        assert policy.on_arrival(one)
    view = waiting(middling, gamble)
    policy.on_pass(view)
    assert serving_order(policy, view) == [1, 0]
