"""Cached tokens cost nothing, and few jobs are asked about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.app.registry import policy_named
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.view import SchedulerView
from tests.sage_sched.strategies import SERVER, decide, job, waiting
from tests.sage_sched.test_decide import decided

KNOWN = LengthDistribution.from_samples([30, 40], "history")


def answered(arrival: int, input_tokens: int) -> Job:
    return Job(arrival, input_tokens, 100, KNOWN, 0)


@pytest.mark.parametrize("name", ["sage", "uniboost", "fastserve"])
def test_the_longer_prompt_goes_first_if_most_of_it_is_cached(name: str) -> None:
    policy = policy_named(name, {}, SERVER)
    shorter, cached = answered(0, 3000), answered(1, 3500)
    cached_tokens = {0: 0, 1: 0}
    for each in (shorter, cached):
        each.is_ranked = policy.on_arrival(each)
    view = replace(waiting(shorter, cached), cached_tokens=cached_tokens.__getitem__)

    def first() -> int:
        order = decide(view, policy).order
        assert order is not None
        return order[0]

    assert first() == 0
    cached_tokens[1] = 3490
    assert first() == 1
    cached_tokens[1] = 0  # it has been evicted
    assert first() == 0


def test_what_is_cached_in_host_memory_costs_its_way_back() -> None:
    policy = policy_named("sage", {}, SERVER)
    cached = answered(0, 3500)
    cached.is_ranked = policy.on_arrival(cached)
    on_device = replace(waiting(cached), cached_tokens=lambda position: 3400)
    keys = []
    for share in (0.0, 0.5, 2.0):
        swap_token_s = share * SERVER.step_time.prefill_token_s
        server = replace(SERVER, swap_token_s=swap_token_s)
        view = replace(on_device, server=server, host_tokens=lambda position: 3000)
        decide(view, policy)
        keys.append(policy.key(cached, view))
        assert cached.cached_input_tokens == 3400 - min(share, 1.0) * 3000
    assert keys == sorted(set(keys))


def test_new_jobs_and_the_first_to_serve_are_asked_about() -> None:
    jobs = [job(arrival, 10 + arrival) for arrival in range(40)]
    asked: list[int] = []

    def found(position: int) -> int:
        asked.append(position)
        return 0

    view = replace(waiting(*jobs), cached_tokens=found)
    decided(view)
    assert sorted(set(asked)) == list(range(40))
    asked.clear()
    decided(view)
    assert asked == list(range(8))


def test_swapped_ones_and_streaming_sessions_are_not_asked_about() -> None:
    swapped, session = job(0, generated_tokens=5), job(1, keeps_memory=True)

    def found(position: int) -> int:
        raise AssertionError("it lends its KV to whoever asks")

    view: SchedulerView = replace(waiting(swapped, session), swapped=[swapped])
    decided(replace(view, cached_tokens=found))
