"""Levels of urgency, or two classes: the order, and the bound on overtaking."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from bench.simulator.request import Progress
from bench.simulator.run import simulate
from bench.simulator.state import EngineState, Options
from sage_sched.best_effort import Qllm
from sage_sched.job import Hints
from sage_sched.urgency import Urgency
from tests.bench.simulator.traffic import CONFIG, SMALL, mixed
from tests.sage_sched.strategies import SERVER, core_of, job, named, waiting


def test_prefills_of_the_less_urgent_leave_decode_steps_their_share() -> None:
    runs = job(0, 100, lengths=(150,), age=5, hints=Hints(urgency=2))
    later = job(1, 100, lengths=(150,), hints=Hints(urgency=4))
    core = core_of(named("urgency", runs, later, decode_share=0.75))
    view, served, passes = replace(waiting(later), running=[runs]), 1000, list[bool]()
    # If no urgent request runs, the next one is owed no steps.
    for facts in (view, replace(view, served_tokens=400), waiting(later, served_tokens=500)):
        core.plan(facts)
    for _ in range(40):
        passes.append(core.plan(replace(view, served_tokens=served)).decode_only)
        served += 1 if passes[-1] else 400
    decode_s = (passes.index(False, 1) - 1) * SERVER.step_time.decode_s(1, 105)
    prefill_s = SERVER.step_time.prefill_s(1, 400, 0)
    assert not passes[0]
    assert 0.75 <= decode_s / (decode_s + prefill_s) < 0.85


@pytest.mark.parametrize(
    ("policy", "urgencies"),
    [
        (Urgency, (1, 2, 3, 4, 5)),
        (Urgency, (1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5)),
        (Qllm, (1, 2, 3, 4, 5)),
    ],
)
def test_no_request_is_overtaken_by_more_than_the_bound(
    policy: type[Urgency], urgencies: tuple[int, ...]
) -> None:
    piece_tokens, num_overtaken, rng = 200, 0, Random(0)

    def watch(
        state: EngineState, before: list[Progress], after: list[Progress], num_outstanding: int
    ) -> None:
        nonlocal num_overtaken
        for admitted, waits in product({*before}.difference(after), {*before}.intersection(after)):
            later = admitted.job.served_at_arrival_tokens - waits.job.served_at_arrival_tokens
            assert later <= (made.level(waits.job) - (policy is Qllm) * 2) * piece_tokens
            num_overtaken += later > 0

    for seed in range(20):
        parameters = policy.Parameters(level_pools=piece_tokens / SMALL.kv_pool_tokens)
        made = policy(parameters, SMALL.server_facts())
        requests = [
            replace(each, hints=Hints(urgency=rng.choice(urgencies)))
            for each in mixed(80, 8.0, seed, unknown=0.1)
        ]
        simulate(SMALL, made, CONFIG, requests, Options(watch=watch))
    assert num_overtaken > 100
