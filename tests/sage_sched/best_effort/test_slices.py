"""How prefills are cut between layers, and who passes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_sched.best_effort import Qllm, QllmParameters, layers_per_slice, those_who_pass
from sage_sched.job import Job
from tests.sage_sched.strategies import SERVER, waiting
from tests.sage_sched.urgency.test_policy import POOL, job

STEP_TIME = SERVER.step_time


@given(
    new=st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    cached=st.integers(0, 5000),
    num_layers=st.integers(1, 80),
    slice_s=st.floats(1e-4, 10.0),
)
def test_a_slice_takes_as_many_layers_as_fit_into_its_time_and_at_least_one(
    new: list[int], cached: int, num_layers: int, slice_s: float
) -> None:
    layers = layers_per_slice(STEP_TIME, [cached] * len(new), new, num_layers, slice_s)
    pairs = sum(n * (cached + n / 2) for n in new)
    layer_s = STEP_TIME.prefill_s(len(new), sum(new), pairs) / num_layers
    assert 1 <= layers <= num_layers
    assert layers == 1 or layers * layer_s <= slice_s * (1 + 1e-9)
    assert layers == num_layers or (layers + 1) * layer_s > slice_s * (1 - 1e-9)


def policy_with(*jobs: Job) -> Qllm:
    policy = Qllm(QllmParameters(), SERVER)
    for each in jobs:
        assert policy.on_arrival(each)
    return policy


def passing(parked: list[Job], *queue: Job, swapped: tuple[Job, ...] = ()) -> list[int]:
    policy = policy_with(*parked, *queue)
    view = replace(waiting(*queue), swapped=dict.fromkeys(swapped))
    return [queue[position].arrival for position in those_who_pass(parked, policy, view)]


def test_the_sensitive_pass_by_arrival_and_nobody_else() -> None:
    parked = [job(0, 3), job(1, 5)]
    assert passing(parked, job(2, 3), job(4, 2), job(3, 1), job(5, 4)) == [3, 4]


@pytest.mark.parametrize("which", ["parked", "waiting"])
def test_nobody_passes_best_effort_that_has_been_overtaken_for_long_enough(which: str) -> None:
    old, late = job(0, 3, came_at=0), job(9, 2, came_at=POOL + 1)
    other = job(1, 3, came_at=POOL // 2)
    parked, waits = ([old], other) if which == "parked" else ([other], old)
    assert passing(parked, waits, late) == []
    assert passing(parked, waits, replace(late, served_at_arrival_tokens=POOL - 1, place=None)) == [
        9
    ]


def test_one_in_host_memory_waits_and_those_behind_it() -> None:
    first, second, third = job(2, 2), job(3, 2), job(4, 1)
    assert passing([job(0, 3)], first, second, third, swapped=(second,)) == [2]
