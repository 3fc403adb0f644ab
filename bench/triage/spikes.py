"""Requests as "Semantic Scheduling for LLM Inference" simulates them: predictors with errors, which
take time, and arrivals of several at once; see bench.triage.paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.policy import Policy
from sage_sched.urgency.policy import Urgency, UrgencyParameters

_ENGINE = PRESETS["a100-qwen1.5-7b"]
NUM_LEVELS = _NUM_BUCKETS = 5
_BUCKET_TOKENS = 100
# The paper's order has no bound: level by level, whatever came when.
_AS_PRINTED = UrgencyParameters(level_pools=1e6, share=1.0, decode_share=1.0)
_HPJF = replace(_AS_PRINTED, by_length=False, preempts=False)
POLICIES: dict[str, Callable[[], str | Policy]] = {
    "fcfs": lambda: "fcfs",
    "SJF": lambda: "ssjf",
    "HPJF": lambda: Urgency(_HPJF, _ENGINE.server_facts()),
    "semantic": lambda: Urgency(_AS_PRINTED, _ENGINE.server_facts()),
    "`urgency`": lambda: "urgency",
}

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Logged:
    """Requests that come in any order. level: 0 (most urgent) to 4; each of shape (requests,)."""

    level: Integers
    input_tokens: Integers
    answer_tokens: Integers


@dataclass(frozen=True, slots=True)
class Case:
    """policy: of POLICIES. gap_s: between arrivals, of one to `most` requests each. level_error,
    length_error: see bench.triage.paper. latency_s: of the predictor, for each `batch` of requests,
    which it waits for; 1: immediate processing."""

    policy: str = "semantic"
    gap_s: float = 0.1
    most: int = 5
    level_error: float = 0.0
    length_error: float = 0.0
    latency_s: float = 0.0
    batch: int = 1


def waited(logged: Logged, case: Case, seed: int) -> Numbers:
    """Seconds waited for each token, by level, and by all; shape (6,)."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(logged.level))
    level, answer_tokens = logged.level[order], logged.answer_tokens[order]
    came_s = _arrivals_s(len(order), case, rng)
    known_s = predicted_s(came_s, case.latency_s, case.batch)
    buckets = _buckets(logged.answer_tokens)
    bucket_of = np.minimum((answer_tokens - 1) // _BUCKET_TOKENS, _NUM_BUCKETS - 1)
    said = zip(
        with_errors(level, case.level_error, rng).tolist(),
        with_errors(bucket_of, case.length_error, rng).tolist(),
        strict=True,
    )
    requests = [
        SimRequest(
            arrival_s=at_s,
            input_tokens=input_tokens,
            output_tokens=num_tokens,
            max_new_tokens=_BUCKET_TOKENS * _NUM_BUCKETS,
            distribution=buckets[bucket],
            class_name="triage",
            hints=Hints(urgency=1 + urgency),
        )
        for at_s, input_tokens, num_tokens, (urgency, bucket) in zip(
            known_s.tolist(),
            logged.input_tokens[order].tolist(),
            answer_tokens.tolist(),
            said,
            strict=True,
        )
    ]
    policy = POLICIES[case.policy]()
    result = simulate(_ENGINE, policy, SageConfig(), requests, Options(preempt=True))
    per_token_s = (known_s - came_s + result.ttlt_s - result.alone_s) / answer_tokens
    of_levels = [per_token_s[level == one].mean() for one in range(NUM_LEVELS)]
    return np.array([*of_levels, per_token_s.mean()])


def _arrivals_s(number: int, case: Case, rng: np.random.Generator) -> Numbers:
    counts = rng.integers(1, case.most + 1, number)
    return np.repeat(np.arange(number) * case.gap_s, counts)[:number]


def predicted_s(came_s: Numbers, latency_s: float, batch: int) -> Numbers:
    """When the predictor has said something of each: one batch after the other, each as soon as
    its last request has come; shape (requests,)."""
    known_s = np.empty_like(came_s)
    free_s = 0.0
    for first in range(0, len(came_s), batch):
        free_s = max(free_s, float(came_s[first : first + batch].max())) + latency_s
        known_s[first : first + batch] = free_s
    return known_s


def with_errors(truth: Integers, error: float, rng: np.random.Generator) -> Integers:
    """Of 0 to 4, a share `error` is wrong, by about 5 times `error`, or as far as it can be."""
    off = max(1, round(NUM_LEVELS * error))
    sign = rng.choice((-1, 1), len(truth))
    last = NUM_LEVELS - 1
    there, other = truth + sign * off, truth - sign * off
    farthest = np.where(truth * 2 > last, 0, last)
    wrong = np.where(
        (there >= 0) & (there <= last),
        there,
        np.where((other >= 0) & (other <= last), other, farthest),
    )
    return np.where(rng.random(len(truth)) < error, wrong, truth)


def _buckets(answer_tokens: Integers) -> list[LengthDistribution]:
    """What is foreseen of an answer, by its bucket."""
    ends = [_BUCKET_TOKENS * (number + 1) for number in range(_NUM_BUCKETS)]
    of_buckets = [
        answer_tokens[(answer_tokens > end - _BUCKET_TOKENS) & (answer_tokens <= end)]
        for end in ends
    ]
    return [
        LengthDistribution.from_samples(found if len(found) else np.array([end]), "warm")
        for found, end in zip(of_buckets, ends, strict=True)
    ]
