"""Cached tokens cost nothing, and few jobs are asked about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.policy import NoParameters
from tests.sage_sched.situations import ByInput
from tests.sage_sched.strategies import SERVER, decide, job, named, waiting


@pytest.mark.parametrize("name", ["sage", "uniboost", "fastserve"])
def test_the_longer_prompt_goes_first_if_most_of_it_is_cached(name: str) -> None:
    shorter, cached = (job(n, 3000 + 500 * n, lengths=(30, 40)) for n in range(2))
    policy = named(name, shorter, cached)
    for cached_tokens, order in ((0, [0, 1]), (3490, [1, 0]), (0, [0, 1])):
        looked_up = (0, cached_tokens).__getitem__
        view = replace(waiting(shorter, cached), cached_tokens=looked_up)
        assert decide(view, policy).order == order


def test_what_is_cached_in_host_memory_costs_its_way_back() -> None:
    cached = job(0, 3500, lengths=(30, 40))
    policy, keys = named("sage", cached), []
    for share in (0.0, 0.5, 2.0):
        server = replace(SERVER, swap_token_s=share * SERVER.step_time.prefill_token_s)
        view = replace(
            waiting(cached), cached_tokens=lambda position: 3400,
            host_tokens=lambda position: 3000, server=server,
        )  # fmt: skip
        decide(view, policy)
        keys.append(policy.key(cached, view))
        assert cached.cached_input_tokens == 3400 - min(share, 1.0) * 3000
    assert keys == sorted(set(keys))


def test_new_jobs_and_the_first_to_serve_are_asked_about() -> None:
    """Swapped ones and streaming sessions lend their KV to all that ask, so they are not asked."""
    swapped, session = job(40, 99, age=5), job(41, 99, keeps_memory=True)
    others = [job(arrival, 10 + arrival) for arrival in range(40)]
    asked: list[int] = []

    def found(position: int) -> int:
        asked.append(position)
        return 0

    view = replace(waiting(*others, swapped, session), cached_tokens=found, swapped=[swapped])
    for expected in ([*range(40)], [*range(8)]):
        asked.clear()
        decide(view, ByInput(NoParameters(), SERVER))
        assert sorted(set(asked)) == expected
