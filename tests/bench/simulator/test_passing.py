"""Who passes a prefill that is parked between two layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.slices import gives_way, those_who_pass
from sage_sched.best_effort import Qllm, QllmParameters
from sage_sched.job import Job
from tests.sage_sched.strategies import SERVER, waiting
from tests.sage_sched.urgency.test_policy import POOL, job


def passing(parked: list[Job], *queue: Job, swapped: tuple[Job, ...] = ()) -> list[int]:
    policy = Qllm(QllmParameters(), SERVER)
    for each in (*parked, *queue):
        assert policy.on_arrival(each)
    view = replace(waiting(*queue), swapped=dict.fromkeys(swapped))
    return [queue[position].arrival for position in those_who_pass(parked, policy, view)]


def test_the_sensitive_pass_by_arrival_up_to_one_in_host_memory() -> None:
    parked = [job(0, 3), job(1, 5)]
    assert passing(parked, job(2, 3), job(4, 2), job(3, 1), job(5, 4)) == [3, 4]
    first, second, third = job(2, 2), job(3, 2), job(4, 1)
    assert passing([job(0, 3)], first, second, third, swapped=(second,)) == [2]


@pytest.mark.parametrize("which", ["parked", "waiting"])
def test_nobody_passes_best_effort_that_has_been_overtaken_for_long_enough(which: str) -> None:
    old, late = job(0, 3, came_at=0), job(9, 2, came_at=POOL + 1)
    other = job(1, 3, came_at=POOL // 2)
    parked, waits = ([old], other) if which == "parked" else ([other], old)
    assert passing(parked, waits, late) == []
    assert passing(parked, waits, replace(late, served_at_arrival_tokens=POOL - 1, watch=None)) == [
        9
    ]


def test_best_effort_alone_gives_way_inside_a_prefill() -> None:
    policy, best_effort = Qllm(QllmParameters(), SERVER), [job(0, 3), job(1, 5)]
    assert gives_way(policy, best_effort)
    assert not gives_way(policy, [*best_effort, job(2, 2)])
    best_effort[1].promise()
    assert not gives_way(policy, best_effort)
