"""The defining case of each policy, checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sage_sched.app.registry import policy_names
from sage_sched.distribution import Refined
from sage_sched.job import Job
from sage_sched.policy import Policy
from tests.sage_sched.situations import order_of
from tests.sage_sched.strategies import IDLE, job, named

NEEDS_NONE = {"fastserve", "fcfs-fill", "uniboost"}
RUN_TO_THE_END = {"ssjf", "lpt", "ltr", "uniboost", "fcfs-fill", "makespan", "urgency-order"}
BY_ARRIVAL = {"qllm", "urgency-arrival"}
LONGEST_FIRST = {"lpt", "makespan"}
# SageSched, Fig. 6. Nine in ten end at 10 tokens, one at 4000: mean 409 against 200.
GAMBLE = "wait 0:100%10x9,4000 1:100%200"
# The answers are nearly alike. The cost of output alone does not see the prompts.
LONG_PROMPT = "wait 0:3000%90 1:10%100"
# The first has waited for less, or for more, than four pools of work.
STARVED = "wait 0:100%2000 1:100%10s30000; served"


@pytest.mark.parametrize("name", policy_names())
def test_the_shorter_or_longer_goes_first_and_equals_by_arrival(name: str) -> None:
    assert named(name).on_arrival(job()) == (name in NEEDS_NONE)  # has no prediction
    assert named(name).preempts == (name not in RUN_TO_THE_END)
    assert order_of("wait 2:100%100 0:100%100 1:100%100", name) == "0 1 2"
    if name not in NEEDS_NONE | BY_ARRIVAL:
        expected = "0 2 1" if name in LONGEST_FIRST else "1 2 0"
        assert order_of("wait 0:100%900 1:100%20 2:100%300", name) == expected


@pytest.mark.parametrize(
    ("policy", "parameters", "situation", "order"),
    [
        ("sagesched", {}, GAMBLE, "0 1"),
        ("sagesched", {"index": "mean"}, GAMBLE, "1 0"),
        ("ssjf", {}, GAMBLE, "1 0"),
        ("ltr", {}, GAMBLE, "0 1"),  # the median
        ("sage", {}, GAMBLE, "0 1"),
        ("sage", {}, "wait 0:100%10x9,4000+400 1:100%200", "1 0"),
        ("sagesched", {"cost": "output"}, LONG_PROMPT, "0 1"),
        ("sagesched", {"cost": "overall"}, LONG_PROMPT, "1 0"),
        ("sagesched", {"cost": "resource-bound"}, LONG_PROMPT, "1 0"),
        ("sagesched", {"cost": "seconds"}, LONG_PROMPT, "1 0"),
        ("ltr", {"starvation_pools": 4.0}, f"{STARVED} 30000", "1 0"),
        ("ltr", {"starvation_pools": 4.0}, f"{STARVED} 50000", "0 1"),
        # ln(1 / (1 - exp(-0.01))) = 4.6 pools against ln(1 / (1 - exp(-0.5))) = 0.93 pools.
        ("uniboost", {}, "wait 0:5000%5 1:100%5s30000", "1 0"),
        ("uniboost", {}, "wait 0:5000%5 1:100%5s40000", "0 1"),
        ("fcfs-fill", {}, "wait 2:100%9+50 0:100%900 1:100 3:100%1; served 1000000", "0 1 2 3"),
    ],
)
def test_who_goes_first(
    policy: str, parameters: dict[str, Any], situation: str, order: str
) -> None:
    assert order_of(situation, policy, **parameters) == order


def ranked(length: int, input_tokens: int = 100) -> Job:
    return job(0, input_tokens, lengths=(length,))


def yields(policy: Policy, running: Job, waiting: Job, age: int) -> bool:
    running.generated_tokens = age
    return policy.should_preempt(running, waiting, 0.0, IDLE)


def test_trail_goes_by_hidden_states_and_yields_while_young() -> None:
    running, shorter = ranked(1000), ranked(100)
    policy = named("trail", running, shorter)
    assert policy.key(running, IDLE) == 1000
    for age, second, left in ((0, 1.0, 250), (1, 0.5, 150), (199, 0.5, 150)):
        weights = np.array([1 - second, second])
        running.revise(Refined(age, age + np.array([50.0, 250.0]), weights))
        running.generated_tokens = age
        policy.on_predictions([running])
        assert policy.key(running, IDLE) == left
        assert yields(policy, running, shorter, age)
    # The limit is that of the first prediction, 250.
    assert not yields(policy, running, shorter, 200)
