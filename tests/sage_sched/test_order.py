"""The order of waiting and of running jobs, and SGLang's priorities, which are levels of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.job import Job
from sage_sched.order import retention_order, serving_order
from tests.sage_sched.situations import order_of
from tests.sage_sched.strategies import IDLE, distributions, named, waiting


@st.composite
def queues(draw: st.DrawFn, with_levels: bool = True) -> list[Job]:
    policy, queue, served = named("sage"), list[Job](), 0
    for arrival in range(draw(st.integers(0, 12))):
        served += draw(st.integers(0, 5000))
        lengths = draw(st.none() | distributions(max_size=5))
        one = Job(arrival, draw(st.integers(1, 2000)), 4096, lengths, served)
        one.grow(draw(st.sampled_from([0, 0, 150, 900])))
        if with_levels:
            one.level = draw(st.integers(-1, 1))
            one.passed_starvation_bound = draw(st.booleans())
        one.is_ranked = policy.on_arrival(one)
        queue.append(one)
    return draw(st.permutations(queue))


def served(queue: list[Job]) -> list[Job]:
    return [queue[position] for position in serving_order(named("sage"), waiting(*queue))]


@given(queues(with_levels=False))
def test_ranked_jobs_are_sorted_and_others_keep_their_places(queue: list[Job]) -> None:
    order = served(queue)
    assert {*order} == {*queue}
    for position, one in enumerate(order):
        assert one.is_ranked or position == one.arrival  # all that have come wait
    policy = named("sage")
    keys = [(policy.key(one, IDLE), one.arrival) for one in order if one.is_ranked]
    assert keys == sorted(keys)


@given(queues(), st.randoms())
def test_how_the_queue_was_ordered_before_does_not_matter(queue: list[Job], random: object) -> None:
    # It may differ between tensor-parallel ranks.
    assert served(sorted(queue, key=lambda one: hash((one.arrival, 7)) % 11)) == served(queue)


@given(queues())
def test_levels_come_first_and_within_a_level_it_is_what_it_would_be(jobs: list[Job]) -> None:
    order = served(jobs)
    kept = [jobs[p] for p in retention_order(jobs, range(len(jobs)), named("sage"), IDLE)]
    assert len(order) == len(kept) == len(jobs)
    for found in (order, kept):
        assert [one.level for one in found] == sorted(one.level for one in jobs)
    for level in (-1, 0, 1):
        alone = served([one for one in jobs if one.level == level])
        ranked = [one for one in order if one.level == level and one.is_ranked]
        assert ranked == [one for one in alone if one.is_ranked]


@pytest.mark.parametrize(
    ("num_left", "order"),
    [
        (7, "0 1 2 3 4 5 6"), (6, "0 1 3 2 4 5"), (5, "0 3 1 2 4"), (4, "3 0 1 2"), (3, "3 0 1"),
    ],
)  # fmt: skip
def test_an_unranked_job_moves_up_with_each_that_leaves(num_left: int, order: str) -> None:
    """The last to come leave first."""
    ranked = [f"{arrival}:100%{100 + arrival}" for arrival in (0, 1, 2, 4, 5, 6)]
    situation = f"wait 3:100? {' '.join(ranked[: num_left - 1])}; come 7"
    assert order_of(situation, "sage") == order
