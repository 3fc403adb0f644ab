"""Checks whether preemption changes answers. Tests use parts of it.

The same requests go to a stock server with room for all, and to one of ours whose KV pool is so
small that requests are preempted all the time. The check compares token ids and log probabilities.
It also measures the effect of batching alone: the stock server gets many requests at a time, few,
and one by one.

All answers have a known length (ignore_eos), so SGLang reserves their memory in full and never
retracts: in bfloat16 a retracted request would be recomputed with kernels that round differently.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import requests
from tqdm import tqdm

from bench.engines.server.policy_server import PolicyServers, scheduler_state
from bench.policies.fastserve import FastServeParameters
from sage_sched.app.config import SageConfig

# The stock server gets many requests at a time, also this many, and this many one by one.
_MANY, _FEW, _ALONE = 128, 6, 50
_ROOMY = ("--max-total-tokens", "16384", "--max-running-requests", "24")
_STARVED = ("--max-total-tokens", "640", "--max-running-requests", "6")
# The most frequent preemption: each time that a request's age has doubled.
_OFTEN = SageConfig(policy={"fastserve": FastServeParameters(6.0, 4, max_preemptions=1000)})
_PROMPT = (
    "{} dragons learn to sail the seven seas. Write their story, from the first day to the last."
)
_SHORTEST, _LONGEST = 4, 100
# SGLang accounts for every token of the pool after every step, and exits if one is lost.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
TWO_REPLICAS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
TWO_RANKS = TWO_REPLICAS | {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer: its text and token ids, their log probabilities, and its number of retractions."""

    text: str
    ids: list[int]
    logprobs: list[float]
    num_retractions: int


def crowd(num_requests: int, seed: int = 0) -> list[tuple[str, int]]:
    """Return prompts, all different, and the number of tokens that each is to get."""
    rng = random.Random(seed)
    return [(_PROMPT.format(i), rng.randint(_SHORTEST, _LONGEST)) for i in range(num_requests)]


class Answering(Protocol):
    """A server, or several."""

    url: str


def ask(
    server: Answering,
    asked: Sequence[tuple[str, int]],
    at_a_time: int,
    sampling: Sequence[Mapping[str, Any]] = ({},),
) -> list[Spoken]:
    """Return the answers, with `at_a_time` requests in flight. Raises requests.RequestException.

    sampling: further parameters for the requests, in turn.
    """

    def one(i: int) -> Spoken:
        prompt, num_tokens = asked[i]
        sampling_params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        sampling_params |= sampling[i % len(sampling)]
        body = {"text": prompt, "sampling_params": sampling_params, "return_logprob": True}
        response = requests.post(f"{server.url}/generate", json=body, timeout=600)
        response.raise_for_status()
        answer = response.json()
        meta = answer["meta_info"]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        return Spoken(answer["text"], answer["output_ids"], logprobs, meta["num_retractions"])

    with ThreadPoolExecutor(at_a_time) as pool:
        return list(tqdm(pool.map(one, range(len(asked))), total=len(asked), leave=False))


def differences(
    left: Sequence[Spoken], right: Sequence[Spoken], tie: float = -1.0
) -> tuple[int, float]:
    """Return the number of answers that differ in a token, and the largest difference of a log
    probability before the first different tokens.

    tie: answers that diverge at tokens whose log probabilities differ by no more are not counted.
    """
    num_different, largest = 0, 0.0
    for one, other in zip(left, right, strict=True):
        gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=False)]
        same = [a == b for a, b in zip(one.ids, other.ids, strict=False)]
        parts_at = same.index(False) if False in same else None
        largest = max([largest, *gaps[:parts_at]])
        if one.ids != other.ids:
            num_different += parts_at is None or gaps[parts_at] > tie
    return num_different, largest


def measure(
    servers: PolicyServers, num_requests: int, sampling: Sequence[Mapping[str, Any]] = ({},)
) -> dict[str, Any]:
    """Return the number of the second server's answers that differ, the number without a tie among
    them, and the largest difference of log probabilities. The same is returned for batches alone,
    with the counts of preemptions.

    Raises ServerError, requests.RequestException, and AssertionError if answers differ by more than
    batching explains, or if too few requests were preempted.
    """
    asked, calm = crowd(num_requests), []
    with replace(servers, flags=servers.flags + _ROOMY).server("fcfs", "calm") as server:
        for width, some in ((_MANY, asked), (_FEW, asked), (1, asked[:_ALONE])):
            calm.append(ask(server, some, width, sampling))
            requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    starved = replace(servers, flags=servers.flags + _STARVED, sage=_OFTEN)
    with starved.server("fastserve", "preempting") as server:
        preempted = ask(server, asked, _MANY, sampling)
        counts = scheduler_state(server)["preemption"]
    many, few, alone = calm
    by_batch = differences(many, few), differences(many[: len(alone)], alone)
    # Maxima of rounding errors, over more answers and over fewer.
    allowed = 2 * max(largest for _, largest in by_batch)
    num_retracted = sum(answer.num_retractions for answer in preempted) - counts["num_preemptions"]
    found = {
        "preempted": differences(many, preempted),
        "num_without_tie": differences(many, preempted, tie=allowed)[0],
        "few_at_a_time": by_batch[0],
        "one_by_one": by_batch[1],
        "num_retracted": num_retracted,
        **{name: counts[name] for name in ("num_preemptions", "num_resumed", "num_recomputed")},
    }
    if found["num_without_tie"] or found["preempted"][1] > allowed:
        raise AssertionError(f"answers differ: {found}")
    if counts["num_preemptions"] < len(asked):
        raise AssertionError(f"too few requests were preempted for a meaningful check: {found}")
    return found
