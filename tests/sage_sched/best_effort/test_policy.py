"""Two classes: who goes first, and how far best effort is overtaken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_sched.app.config import SageConfig
from sage_sched.best_effort import Qllm, QllmParameters
from sage_sched.fields import ConfigError
from sage_sched.job import Job
from sage_sched.plan import UNLIMITED, Preempt
from tests.sage_sched.crowd import ROOMY, crowd, overtakings
from tests.sage_sched.strategies import SERVER, decide, waiting
from tests.sage_sched.urgency.test_policy import KNOWN, LONG, POOL, job, roomy


def policy_of(**parameters: float) -> Qllm:
    return Qllm(QllmParameters(**parameters), SERVER)  # type: ignore[arg-type]


def order(policy: Qllm, *jobs: Job) -> list[int]:
    for each in jobs:
        assert policy.on_arrival(each)
    found = decide(waiting(*jobs), policy).order
    assert found is not None
    return [jobs[position].arrival for position in found]


def test_the_sensitive_go_first_and_each_class_goes_by_arrival_whatever_the_length() -> None:
    levels = [(5, KNOWN), (3, LONG), (3, KNOWN), (2, LONG), (1, KNOWN), (2, KNOWN)]
    jobs = [job(number, level, known=known) for number, (level, known) in enumerate(levels)]
    assert order(policy_of(), *jobs) == [3, 4, 5, 0, 1, 2]


def test_best_effort_is_overtaken_by_who_comes_within_a_pool_of_work() -> None:
    old = job(0, 3, came_at=10)
    assert order(policy_of(), old, job(1, 1, came_at=9 + POOL)) == [1, 0]
    assert order(policy_of(), replace(old, memo=None), job(1, 1, came_at=11 + POOL)) == [0, 1]


@pytest.mark.parametrize(
    ("victim", "newcomer", "yields"), [(3, 2, True), (5, 3, False), (2, 1, False), (3, 1, True)]
)
def test_best_effort_yields_to_sensitive_jobs(victim: int, newcomer: int, yields: bool) -> None:
    policy = policy_of()
    running, comes = job(0, victim, known=LONG, generated_tokens=1), job(1, newcomer)
    for each in (running, comes):
        policy.on_arrival(each)
    plan = decide(roomy(waiting(comes), running), policy)
    assert any(isinstance(action, Preempt) for action in plan.actions) == yields


def test_the_sensitive_are_prefilled_by_themselves_unless_best_effort_goes_before_them() -> None:
    policy = policy_of()
    jobs = [job(0, 3), job(1, 2), job(2, 3), job(3, 1)]
    for each in jobs:
        assert policy.on_arrival(each)
    cached = {3: 40}
    view = replace(waiting(*jobs), page_size=16, cached_tokens=lambda place: cached.get(place, 0))
    plan = decide(view, policy)
    # 100 and 60 tokens, in pages, and one to spare.
    assert plan.budget.prefill_tokens == (7 + 4 + 1) * 16
    assert decide(waiting(jobs[0], jobs[2]), policy).budget == UNLIMITED
    old, late = job(4, 3), job(5, 2, came_at=POOL + 1)
    for each in (old, late):
        assert policy.on_arrival(each)
    assert decide(waiting(old, late), policy).budget == UNLIMITED
    swapped = replace(waiting(jobs[0], jobs[1]), swapped={jobs[1]: None})
    assert decide(swapped, policy).budget == UNLIMITED
    # Nor if its adapter finds no room, so that others pass it.
    passed = replace(waiting(*jobs[:3]), running=[jobs[3]], has_adapter=lambda place: place != 1)
    assert decide(passed, policy).budget == UNLIMITED


def test_a_best_effort_chunk_shrinks_to_a_page_beside_sensitive_prompts() -> None:
    policy = policy_of()
    chunked, sensitive = replace(job(0, 3), input_tokens=3000), job(1, 2)
    for each in (chunked, sensitive):
        assert policy.on_arrival(each)
    view = replace(
        waiting(sensitive), chunked=chunked, page_size=16, can_swap=False, may_preempt=False
    )
    plan = decide(view, policy)
    assert plan.budget.prefill_tokens == 8 * 16
    assert plan.budget.chunk_tokens == 16


def test_best_effort_is_overtaken_by_no_more_than_the_bound() -> None:
    piece_tokens, num_overtaken = 200, 0
    for seed in range(20):
        parameters = QllmParameters(level_pools=piece_tokens / ROOMY.kv_pool_tokens)
        policy = Qllm(parameters, ROOMY.server_facts())
        for admitted, waits in overtakings(policy, crowd(seed, urgencies=(1, 2, 3, 4, 5))):
            if not policy.passes(waits):
                later = admitted.served_at_arrival_tokens - waits.served_at_arrival_tokens
                assert later <= piece_tokens
                num_overtaken += later > 0
    assert num_overtaken > 100


@pytest.mark.parametrize(("field", "value"), [("level_pools", 0.0), ("decode_share", 2.0)])
def test_a_setting_that_cannot_be_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.qllm\.{field} is {value}, allowed: "):
        SageConfig.parse({"policy": {"qllm": {field: value}}})
