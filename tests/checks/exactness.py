"""Checks that preemption does not change answers: `python -m tests.checks.exactness`.

The same requests go to a stock server with room for all, and to one of ours whose KV pool is so
small that requests are preempted all the time. The check compares token ids and log probabilities.
It also measures the effect of batching alone: the stock server gets many requests at a time, few,
and one by one.

Exit code 1 if an answer of the second server differs in a token, or in a log probability by more
than batching explains; 2 if the runs failed or too few requests were preempted. Answers that differ
first where two tokens are equally likely are counted separately.

All answers have a known length (ignore_eos), so SGLang reserves their memory in full and never
retracts: in bfloat16 a retracted request would be recomputed with kernels that round differently.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import requests
from tqdm import tqdm

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import ServerError
from bench.policies.fastserve import FastServeParameters
from sage_sched.app.config import SageConfig

_OUTPUT = Path("results/exactness")
# The stock server also gets this many requests at a time, and this many one by one.
_FEW, _ALONE = 6, 50
_ROOMY = ("--max-total-tokens", "16384", "--max-running-requests", "24")
_STARVED = ("--max-total-tokens", "640")
_PROMPT = (
    "{} dragons learn to sail the seven seas. Write their story, from the first day to the last."
)
_SHORTEST, _LONGEST = 4, 100
# Four heads give a head size that a GPU's kernels support.
_GPU_HIDDEN_SIZE = 512
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


class Restless(NamedTuple):
    """A policy that preempts often, and the load that makes it do so: requests in flight, requests
    that may run, and the preemptions per request below which the check means nothing."""

    config: SageConfig
    at_a_time: int
    num_slots: int
    least_preemptions: float


_OFTEN = FastServeParameters(6.0, 4, max_preemptions=1000)
RESTLESS = {
    # More requests run than memory has room for to their ends, so it runs out again and again.
    "sage": Restless(SageConfig(), 32, 16, 1 / 3),
    # The most frequent preemption: each time that a request's age has doubled.
    "fastserve": Restless(SageConfig(policy={"fastserve": _OFTEN}), 128, 6, 1.0),
}


def crowd(num_requests: int, seed: int = 0) -> list[tuple[str, int]]:
    """Return prompts, all different, and the number of tokens that each is to get."""
    rng = random.Random(seed)
    return [(_PROMPT.format(i), rng.randint(_SHORTEST, _LONGEST)) for i in range(num_requests)]


class Answering(Protocol):
    """A server, or several."""

    @property
    def url(self) -> str: ...
    @property
    def log(self) -> Path: ...
    def log_tail(self) -> str: ...


def ask(
    server: Answering,
    asked: Sequence[tuple[str, int]],
    at_a_time: int,
    sampling: Sequence[Mapping[str, Any]] = ({},),
) -> list[Spoken]:
    """Return the answers, with `at_a_time` requests in flight. Raises ServerError.

    sampling: further parameters, used in turn.
    """

    def one(i: int) -> Spoken:
        prompt, num_tokens = asked[i]
        sampling_params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        sampling_params |= sampling[i % len(sampling)]
        body = {"text": prompt, "sampling_params": sampling_params, "return_logprob": True}
        try:
            response = requests.post(f"{server.url}/generate", json=body, timeout=600)
            response.raise_for_status()
        except requests.RequestException as error:
            raise ServerError(f"{error}; the end of {server.log}:\n{server.log_tail()}") from error
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

    tie: answers that part at tokens whose log probabilities differ by no more are not counted.
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


def agrees(calm: Sequence[Sequence[Spoken]], found: Sequence[Spoken]) -> bool:
    """Whether answers differ by no more than batching explains. Prints the differences.

    calm: of a stock server to many requests at a time, to few, and one by one (the first only).
    """
    many, *others = calm
    by_batch = [differences(many[: len(other)], other) for other in others]
    # Maxima of rounding errors, over more answers and over fewer.
    allowed = 2 * max(largest for _, largest in by_batch)
    preempted = differences(many, found)
    num_parted, _ = differences(many, found, tie=allowed)
    labels = ("few at a time", "one by one", "preempted")
    for label, (number, by) in zip(labels, [*by_batch, preempted], strict=True):
        print(f"{label}: {number} answers differ, log probabilities by {by:.1e} at most")
    print(f"{num_parted} of {len(found)} preempted answers differ where there is no tie")
    return num_parted == 0 and preempted[1] <= allowed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--policy", choices=RESTLESS, default="fastserve")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1)
    parser.add_argument("--mla", action="store_true", help="a model with latent attention")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server-flags", type=shlex.split, default=[], help="SGLang's, for both")
    parser.add_argument("--model-path", type=Path, help="a model that ends its answers itself")
    try:
        return measure(parser.parse_args(argv))
    except ServerError as error:
        print(f"exactness: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    """Run both servers, print the comparison, and return the exit code."""
    restless, on_cpu = RESTLESS[args.policy], args.device == "cpu"
    asked, sampling = crowd(args.num_requests), [{"ignore_eos": args.model_path is None}]
    model = args.model_path or write_model(
        _OUTPUT / f"model-{'mla' if args.mla else 'mha'}-{args.dtype}-{args.device}",
        dtype=args.dtype,
        latent_attention=args.mla,
        hidden_size=128 if on_cpu else _GPU_HIDDEN_SIZE,
    )
    host = CPU_ENGINE_FLAGS if on_cpu else ("--mem-fraction-static", "0.1")
    servers = PolicyServers(
        model=model,
        folder=_OUTPUT,
        flags=(*host, "--dtype", args.dtype, "--tp-size", str(args.tp), *args.server_flags),
        env=(CPU_ENV if on_cpu else {}) | STRICT | (TWO_RANKS if args.tp == 2 else {}),
        sage=restless.config,
    )
    calm = []
    with replace(servers, flags=servers.flags + _ROOMY).server("fcfs", "calm") as server:
        whole = len(asked)
        for num_asked, width in ((whole, restless.at_a_time), (whole, _FEW), (_ALONE, 1)):
            calm.append(ask(server, asked[:num_asked], width, sampling))
            requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    slots = ("--max-running-requests", str(restless.num_slots))
    starved = replace(servers, flags=servers.flags + _STARVED + slots)
    with starved.server(args.policy, "preempting") as server:
        found = ask(server, asked, restless.at_a_time, sampling)
        counts = scheduler_state(server)["preemption"]
    num_retracted = sum(answer.num_retractions for answer in found) - counts["num_preemptions"]
    print(
        f"{len(asked)} requests, {sum(len(answer.ids) for answer in found)} tokens, "
        f"{counts['num_preemptions']} preemptions, {counts['num_resumed']} swapped in, "
        f"{num_retracted + counts['num_recomputed']} recomputed, "
        f"{counts['swapped_bytes'] / 1e6:.1f} MB moved"
    )
    is_exact = agrees(calm, found)
    if counts["num_preemptions"] < restless.least_preemptions * len(asked):
        print("exactness: too few requests were preempted for a meaningful check", file=sys.stderr)
        return 2
    return int(not is_exact)


if __name__ == "__main__":
    sys.exit(main())
