from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.order import retention_order, serving_order
from sage_sched.policies.sage import Sage, SageParameters
from tests.sage_sched.strategies import IDLE, SERVER, distributions, waiting


def sage(**parameters: float) -> Sage:
    return Sage(SageParameters(**parameters), SERVER)  # type: ignore[arg-type]


@st.composite
def queues(draw: st.DrawFn) -> list[Job]:
    policy = sage()
    queue: list[Job] = []
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
        job.is_ranked = policy.on_arrival(job)
        queue.append(job)
    return draw(st.permutations(queue))


@given(queues())
def test_ranked_jobs_are_sorted_and_others_keep_their_places(queue: list[Job]) -> None:
    policy = sage()
    order = serving_order(policy, waiting(*queue))
    assert sorted(order) == list(range(len(queue)))
    served = [queue[position] for position in order]
    for position, job in enumerate(served):
        if not job.is_ranked:
            assert position == job.arrival  # all that have come wait
    keys = [(policy.key(job, IDLE), job.arrival) for job in served if job.is_ranked]
    assert keys == sorted(keys)


@given(queues(), st.randoms())
def test_how_the_queue_was_ordered_before_does_not_matter(queue: list[Job], random: object) -> None:
    # It may differ between tensor-parallel ranks.
    policy = sage()
    once = [queue[position].arrival for position in serving_order(policy, waiting(*queue))]
    shuffled = sorted(queue, key=lambda job: hash((job.arrival, 7)) % 11)
    order = serving_order(policy, waiting(*shuffled))
    assert [shuffled[position].arrival for position in order] == once


def job_of(lengths: list[int], arrival: int, served: int = 0) -> Job:
    return Job(
        arrival=arrival,
        input_tokens=100,
        max_new_tokens=4096,
        distribution=LengthDistribution.from_samples(lengths * 50, "history"),
        served_at_arrival_tokens=served,
    )


def test_what_cannot_be_ranked_moves_up_with_each_that_leaves() -> None:
    policy = sage()
    unknown = Job(3, 100, 4096, None, 0, is_ranked=False)
    others = [job_of([100 + arrival], arrival) for arrival in (0, 1, 2, 4, 5, 6)]
    assert all(policy.on_arrival(job) for job in others)
    for num_gone, place in ((0, 3), (1, 2), (2, 1), (3, 0), (4, 0)):
        # The last jobs that came leave first. The unranked job still has three before it.
        queue = [unknown, *others[: 6 - num_gone]]
        order = serving_order(policy, replace(waiting(*queue), num_arrivals=7))
        assert order.index(0) == place


def test_if_memory_runs_out_the_last_of_the_order_goes_first() -> None:
    policy = sage()
    unknown = Job(0, 20, 1000, None, 0, is_ranked=False)
    jobs = [unknown, job_of([900], 1), job_of([10], 2), job_of([300], 3)]
    assert all(policy.on_arrival(job) for job in jobs[1:])
    # SGLang's own order would retract the one with the fewest tokens, here the short one.
    assert retention_order(jobs, [1, 3, 2, 0], policy, IDLE) == [2, 3, 1, 0]
    assert retention_order(jobs, [0, 1, 3, 2], policy, IDLE) == [0, 2, 3, 1]
