from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sage_sched.queue import ranked_order

from sage_sched.config import PolicyConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.policies.sage import SagePolicy
from sage_sched.policy import policy_named, policy_names
from tests.sage_sched.strategies import SERVER, distributions


@st.composite
def queues(draw: st.DrawFn) -> list[Job | None]:
    policy = SagePolicy(PolicyConfig(), SERVER)
    queue: list[Job | None] = []
    served = 0
    for arrival in range(draw(st.integers(0, 12))):
        served += draw(st.integers(0, 5000))
        job = Job(
            arrival=arrival,
            input_tokens=draw(st.integers(1, 2000)),
            max_new_tokens=4096,
            distribution=draw(st.none() | distributions(max_size=5)),
            served_at_arrival_tokens=served,
            generated_tokens=draw(st.sampled_from([0, 0, 150, 900])),
        )
        queue.append(job if policy.admit(job) else None)
    return draw(st.permutations(queue))


@given(queues())
def test_ranked_jobs_are_sorted_and_the_others_stay_where_they_are(
    queue: list[Job | None],
) -> None:
    policy = SagePolicy(PolicyConfig(), SERVER)
    order = ranked_order(queue, policy, 0)
    assert sorted(order) == list(range(len(queue)))
    served = [queue[position] for position in order]
    for position, job in enumerate(queue):
        if job is None:
            assert order[position] == position
    keys = [(policy.key(job, 0), job.arrival) for job in served if job is not None]
    assert keys == sorted(keys)


@given(queues())
def test_sorting_again_changes_nothing(queue: list[Job | None]) -> None:
    policy = SagePolicy(PolicyConfig(), SERVER)
    once = [queue[position] for position in ranked_order(queue, policy, 0)]
    assert ranked_order(once, policy, 0) == list(range(len(once)))


def job_of(lengths: list[int], arrival: int, served: int) -> Job:
    return Job(
        arrival=arrival,
        input_tokens=100,
        max_new_tokens=4096,
        distribution=LengthDistribution.from_samples(lengths * 50, "history"),
        served_at_arrival_tokens=served,
    )


def test_equal_jobs_go_in_order_of_arrival() -> None:
    policy = SagePolicy(PolicyConfig(), SERVER)
    jobs = [job_of([100, 200], arrival, 0) for arrival in range(5)]
    assert all(policy.admit(job) for job in jobs)
    assert ranked_order(jobs[::-1], policy, 0) == [4, 3, 2, 1, 0]


def test_aging_bounds_how_long_a_long_job_is_overtaken() -> None:
    policy = SagePolicy(PolicyConfig(aging_pools=2.0), SERVER)
    long_job = job_of([4000], 0, 0)
    assert policy.admit(long_job)

    def overtakes(served: int) -> bool:
        short_job = job_of([10], 1, served)
        assert policy.admit(short_job)
        return ranked_order([long_job, short_job], policy, 0) == [1, 0]

    short_job = job_of([10], 1, 0)
    assert policy.admit(short_job)
    ratio = math.exp(policy.key(long_job, 0) - policy.key(short_job, 0))
    bound_tokens = 2 * SERVER.kv_pool_tokens * math.log(ratio)
    assert overtakes(0)
    assert overtakes(int(bound_tokens) - 10)
    assert not overtakes(int(bound_tokens) + 10)


def test_policies_are_found_by_name_and_an_unknown_one_lists_them() -> None:
    assert policy_named("sage") is SagePolicy
    with pytest.raises(ValueError, match=", ".join(policy_names())):
        policy_named("sega")
