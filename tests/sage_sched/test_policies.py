"""The defining case of each policy, checked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policies.srpt_oracle import SrptOracle, SrptOracleParameters
from sage_sched.app.registry import policy_named, policy_names, policy_type, section_of
from sage_sched.distribution import LengthDistribution, Refined
from sage_sched.job import Job
from sage_sched.order import serving_order
from sage_sched.policy import Policy
from sage_sched.steps import seconds_on
from tests.sage_sched.strategies import IDLE, SERVER, distributions, waiting

POOL = SERVER.kv_pool_tokens


def job(
    *lengths: int, arrival: int = 0, input_tokens: int = 100, age: int = 0, served: int = 0
) -> Job:
    """A job whose length is one of these, each as likely, known from many samples."""
    return Job(
        arrival=arrival,
        input_tokens=input_tokens,
        max_new_tokens=4096,
        distribution=LengthDistribution.from_samples(list(lengths) * 1000, "history"),
        served_at_arrival_tokens=served,
        generated_tokens=age,
    )


def true_job(length: int, **about: int) -> Job:
    one = job(length, **about)
    one.distribution = LengthDistribution.from_samples([length], "truth")
    return one


def order(name: str, jobs: list[Job], served: int = 0, **parameters: Any) -> list[int]:
    """The positions in which the policy serves these jobs."""
    return serving_order(ranking(name, *jobs, **parameters), waiting(*jobs, served_tokens=served))


def ranking(name: str, *jobs: Job, **parameters: Any) -> Policy:
    """The policy, with jobs that have come."""
    policy = policy_named(
        name, {section_of(name): policy_type(name).Parameters(**parameters)}, SERVER
    )
    for one in jobs:
        one.watch = None  # it may have come under another policy before
        assert policy.on_arrival(one)
    return policy


NEEDS_NONE = {"fastserve", "fcfs-fill", "uniboost"}
NEEDS_LENGTHS = sorted(set(policy_names()) - NEEDS_NONE)


@pytest.mark.parametrize("name", NEEDS_LENGTHS)
def test_without_a_prediction_it_cannot_rank(name: str) -> None:
    unknown = job(5)
    unknown.distribution = None
    assert not policy_named(name, {}, SERVER).on_arrival(unknown)


BY_ARRIVAL = {"qllm", "urgency-arrival"}
LONGEST_FIRST = {"lpt", "makespan"}


@pytest.mark.parametrize("name", sorted(set(policy_names()) - NEEDS_NONE - BY_ARRIVAL))
def test_of_equal_prompts_the_surely_shorter_or_longer_goes_first(name: str) -> None:
    jobs = [true_job(900), true_job(20, arrival=1), true_job(300, arrival=2)]
    assert order(name, jobs) == ([0, 2, 1] if name in LONGEST_FIRST else [1, 2, 0])


def test_foresight_under_fcfs_leaves_the_order_alone() -> None:
    unknown = job(5, arrival=1)
    unknown.distribution = None
    jobs = [job(9, arrival=2, age=50), job(900, arrival=0), unknown, job(1, arrival=3, served=-1)]
    assert order("fcfs-fill", jobs, served=10**6) == [1, 2, 0, 3]
    policy = ranking("fcfs-fill", *jobs)
    assert not policy.preempts


@pytest.mark.parametrize("name", policy_names())
def test_equals_go_in_order_of_arrival(name: str) -> None:
    jobs = [true_job(100, arrival=arrival) for arrival in (2, 0, 1)]
    assert order(name, jobs) == [1, 2, 0]


@pytest.mark.parametrize("name", policy_names())
@given(lengths=distributions(max_size=6), age=st.integers(0, 6000), served=st.integers(0, 10**6))
def test_keys_are_numbers(name: str, lengths: LengthDistribution, age: int, served: int) -> None:
    one = job(1, served=served // 2)
    one.distribution = lengths
    policy = ranking(name, one)
    one.grow(age)
    assert math.isfinite(policy.key(one, waiting(served_tokens=served)))


def test_gittins_prefers_a_gamble_that_the_mean_does_not() -> None:
    # SageSched, Fig. 6. Nine in ten end at 10 tokens, one at 4000: mean 409 against 200.
    gamble, middling = job(*[10] * 9, 4000), job(200, arrival=1)
    for policy, parameters, expected in (
        ("sagesched", {}, [0, 1]),
        ("sagesched", {"index": "mean"}, [1, 0]),
        ("ssjf", {}, [1, 0]),
        ("ltr", {}, [0, 1]),  # the median
    ):
        assert order(policy, [gamble, middling], **parameters) == expected


def test_a_lost_gamble_loses_its_place() -> None:
    gamble, middling = job(*[10] * 9, 4000), job(200, arrival=1)
    assert order("sage", [gamble, middling]) == [0, 1]
    gamble.grow(400)
    assert order("sage", [gamble, middling]) == [1, 0]


def test_costs_disagree_about_a_long_prompt() -> None:
    # Same answer, or nearly: the output cost does not see the prompt, all the others do.
    long_prompt, short_prompt = job(90, input_tokens=3000), job(100, input_tokens=10, arrival=1)
    jobs = [long_prompt, short_prompt]
    assert order("sagesched", jobs, cost="output") == [0, 1]
    for cost in ("overall", "resource-bound", "seconds"):
        assert order("sagesched", jobs, cost=cost) == [1, 0]


def test_the_measured_cost_is_in_seconds_of_the_server() -> None:
    # Prefill 1 step and 1000 tokens; 10 steps at 1/32 of the slots; 10 * 1000 + 50 token steps at
    # 1/10000 of the pool and at their own price.
    step = SERVER.step_time
    expected = (
        step.prefill_base_s
        + 1000 * step.prefill_token_s
        + 10 * step.decode_base_s / 32
        + 10_050 * (step.decode_base_s / 10_000 + step.decode_kv_token_s)
    )
    assert seconds_on(SERVER)(1000, 10) == pytest.approx(expected)


def test_trail_prompt_yields_while_young_and_to_a_shorter_one_only() -> None:
    running, shorter, longer = job(1000), job(100), job(2000)
    policy = ranking("trail-prompt", running, shorter, longer)
    assert policy.should_preempt(running, shorter, 0.0, IDLE)
    assert not policy.should_preempt(running, longer, 0.0, IDLE)
    running.generated_tokens = 799
    assert policy.should_preempt(running, shorter, 0.0, IDLE)
    running.generated_tokens = 810  # past 0.8 of its first prediction
    assert not policy.should_preempt(running, shorter, 0.0, IDLE)
    # It is the last to leave when memory runs out, however little is left of others.
    ending = job(100, age=1)
    assert policy.on_arrival(ending)
    assert policy.key(running, IDLE) < policy.key(ending, IDLE)


@pytest.mark.parametrize("name", ["ssjf", "ltr", "uniboost"])
def test_the_others_run_a_request_to_its_end(name: str) -> None:
    assert not ranking(name, job(4000), job(1)).preempts


def test_ltr_lifts_a_request_that_has_starved() -> None:
    starved = job(2000, arrival=0)
    fresh = job(10, arrival=1, served=3 * POOL)
    assert order("ltr", [starved, fresh], served=3 * POOL, starvation_pools=4.0) == [1, 0]
    assert order("ltr", [starved, fresh], served=5 * POOL, starvation_pools=4.0) == [0, 1]


def test_fastserve_demotes_by_service_and_joins_by_the_prefill() -> None:
    # A token at full slots takes 42.64 ms; quanta are 100, 200, 400 ms.
    used, fresh = job(5, age=0), job(5000, arrival=1)
    policy = ranking("fastserve", used, fresh)
    assert policy.key(used, IDLE) == policy.key(fresh, IDLE) == 0
    levels = []
    for age in (2, 3, 7, 8, 16, 17):
        used.generated_tokens = age
        levels.append(policy.key(used, IDLE))
    assert levels == [0, 1, 1, 2, 2, 3]
    assert policy.should_preempt(used, fresh, 0.0, IDLE)
    # 4000 tokens of prompt take 41 + 696 ms: level 3, whose quantum is 800 ms.
    long_prompt = job(5, input_tokens=4000)
    assert policy.on_arrival(long_prompt)
    assert policy.key(long_prompt, IDLE) == 3


def test_uniboost_boosts_short_prompts_by_a_bounded_time() -> None:
    # ln(1 / (1 - exp(-0.01))) = 4.6 pools against ln(1 / (1 - exp(-0.5))) = 0.93 pools.
    long_prompt = job(5, input_tokens=POOL // 2)

    def short_prompt(served: int) -> Job:
        return job(5, input_tokens=POOL // 100, arrival=1, served=served)

    assert order("uniboost", [long_prompt, short_prompt(3 * POOL)]) == [1, 0]
    assert order("uniboost", [long_prompt, short_prompt(4 * POOL)]) == [0, 1]


def test_the_oracle_takes_true_lengths_only() -> None:
    oracle = SrptOracle(SrptOracleParameters(), SERVER)
    with pytest.raises(ValueError, match="true lengths"):
        oracle.on_arrival(job(5))
    nearly_done, short = true_job(1000, age=995), true_job(60, arrival=1)
    assert oracle.on_arrival(nearly_done)
    assert oracle.on_arrival(short)
    assert serving_order(oracle, waiting(nearly_done, short)) == [0, 1]


def test_trail_goes_by_hidden_states_and_yields_while_young() -> None:
    running, shorter = job(1000), job(100, arrival=1)
    policy = ranking("trail", running, shorter)
    assert policy.key(running, IDLE) == 1000
    for age in (0, 1, 199):
        weights = np.array([0.0, 1.0]) if age == 0 else np.array([0.5, 0.5])
        running.generated_tokens = age
        running.revise(Refined(age, age + np.array([50.0, 250.0]), weights))
        policy.on_predictions([running])
        assert policy.key(running, IDLE) == (250 if age == 0 else 150)
        assert policy.should_preempt(running, shorter, 0.0, IDLE)
    # The limit is that of the first prediction, 250.
    running.generated_tokens = 200
    assert not policy.should_preempt(running, shorter, 0.0, IDLE)
