"""Checks that preemption does not change answers: `python -m tests.checks.exactness`.

The same requests go to a stock server with room for all, and to one of ours whose KV pool is so
small that requests are preempted all the time. The check compares token ids and log probabilities.
It also measures the effect of batching alone: the stock server gets many requests at a time, few,
and one by one.

Exit code 1 if an answer of the second server differs in a token, or in a log probability by more
than the batch's size explains; 2 if the runs failed or too few requests were preempted. If two
tokens are equally likely within that tolerance, either may be sampled; answers that differ first at
such a tie are counted separately.

`--policy sage` and `makespan` let more requests run than memory has room for, and preempt the last
of the order when it runs out. With `--apart` one server prefills and another decodes.
`--policy urgency` mixes levels 1 to 5, and more urgent requests preempt running ones.

In bfloat16 one or two requests that decode alone use other kernels, which round differently. The
requests sent one by one show this effect; preemption shows it in runs that come down to so small a
batch.

All answers have a known length (ignore_eos), so SGLang reserves their memory in full and never
retracts. A retracted request would be recomputed with other kernels, which round differently in
bfloat16.
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
from typing import Any, Protocol

import requests
from tqdm import tqdm

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    PolicyServers,
    scheduler_state,
)
from bench.engines.server.server import Server, ServerError
from bench.policies.fastserve import FastServeParameters
from bench.real_model.fetch import fetch
from bench.workloads.chats import prompts
from predictor_store.data.warm import load_tokenizer
from sage_sched.app.config import HintsConfig, SageConfig
from sage_sched.urgency import UrgencyParameters
from tests.checks import mooncake_stand_in
from tests.checks.pair import Pair

_OUTPUT = Path("results/exactness")
# The stock server also gets this many requests at a time, and this many one by one.
_FEW, _ALONE = 6, 50
# Room for all.
_ROOMY = ("--max-total-tokens", "16384", "--max-running-requests", "24")
_STARVED = ("--max-total-tokens", "640")
_STARVED_BY_CHATS = ("--max-total-tokens", "320")
_LONGEST_CHAT_CHARS = 300
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


@dataclass(frozen=True, slots=True)
class Restless:
    """A policy that preempts often, and the load that makes it do so.

    at_a_time: requests in flight.
    num_slots: requests that may run.
    sampling: further parameters, used in turn.
    least_yields: preemptions per request below which the check means nothing.
    """

    config: SageConfig
    at_a_time: int
    least_yields: float
    num_slots: int = 6
    sampling: tuple[Mapping[str, Any], ...] = ({},)


RESTLESS = {
    # More requests run than memory has room for to their ends, so it runs out again and again.
    "sage": Restless(SageConfig(), at_a_time=32, least_yields=1 / 3, num_slots=16),
    "makespan": Restless(SageConfig(), at_a_time=128, least_yields=1 / 3, num_slots=16),
    # The most frequent preemption: each time that a request's age has doubled.
    "fastserve": Restless(
        SageConfig(policy={"fastserve": FastServeParameters(6.0, 4, max_preemptions=1000)}),
        at_a_time=128,
        least_yields=1.0,
    ),
    # Only new requests preempt, so only a few may wait. Levels outweigh the order of arrival.
    "urgency": Restless(
        SageConfig(
            hints=HintsConfig(trust="body"), policy={"urgency": UrgencyParameters(level_pools=10.0)}
        ),
        at_a_time=12,
        least_yields=1 / 3,
        sampling=tuple({"custom_params": {"urgency": level}} for level in (5, 4, 3, 2, 1)),
    ),
}


def chats(num_requests: int, model: Path) -> list[tuple[str, int]]:
    """Return real chats in the model's template, all different, and a cap for each answer."""
    tokenizer = load_tokenizer(str(model))
    rng = random.Random(0)
    texts = [text for text, _ in prompts(4 * num_requests) if len(text) < _LONGEST_CHAT_CHARS]

    def in_template(text: str) -> str:
        turn = [{"role": "user", "content": text}]
        found: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return found

    chosen = texts[:num_requests]
    return [(in_template(text), rng.randint(_SHORTEST, _LONGEST)) for text in chosen]


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
    label: str = "",
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
        answers = pool.map(one, range(len(asked)))
        return list(tqdm(answers, desc=label, total=len(asked), leave=False))


def differences(left: Sequence[Spoken], right: Sequence[Spoken]) -> tuple[int, float]:
    """Return the number of answers that differ in a token, and the largest difference of a log
    probability before the first different tokens."""
    num_different, largest = 0, 0.0
    for one, other in zip(left, right, strict=True):
        num_different += one.ids != other.ids
        for i in range(min(len(one.ids), len(other.ids))):
            if one.ids[i] != other.ids[i]:
                break
            largest = max(largest, abs(one.logprobs[i] - other.logprobs[i]))
    return num_different, largest


def report(
    label: str, calm: Sequence[Spoken], other: Sequence[Spoken], allowed: float = 0.0
) -> tuple[int, float]:
    """Print and return two measures: the number of answers that differ other than at a tie, and the
    largest difference of log probabilities before the first different token.

    Two tokens tie if their log probabilities differ by at most `allowed`. Answers are compared with
    the first ones of `calm`.
    """
    pairs = [*zip(calm, other, strict=False)]
    num_different, largest = differences(calm[: len(other)], other)
    num_parted = sum(gap > allowed for gap in map(parting, pairs) if gap is not None)
    print(
        f"{label:28} {num_different:>4} of {len(other):<4} differ, {num_parted} of them not at a "
        f"tie; log probabilities by {largest:.1e} at most"
    )
    return num_parted, largest


def parting(pair: tuple[Spoken, Spoken]) -> float | None:
    """Return the difference of log probabilities of the first different tokens of two answers; None
    if all are equal."""
    one, other = pair
    for i, ids in enumerate(zip(one.ids, other.ids, strict=True)):
        if ids[0] != ids[1]:
            return abs(one.logprobs[i] - other.logprobs[i])
    return None


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Answers of a stock server to many requests at a time, to few, and one by one (the first ones
    only). They differ by the effect of batching only."""

    label: str
    many: list[Spoken]
    few: list[Spoken]
    alone: list[Spoken]

    @classmethod
    def ask(
        cls,
        server: Server,
        asked: Sequence[tuple[str, int]],
        at_a_time: int,
        label: str,
        sampling: Sequence[Mapping[str, Any]] = ({},),
    ) -> Undisturbed:
        """Ask three times, each time with an empty cache. Raises ServerError."""
        answers = []
        for num_asked, width in ((len(asked), at_a_time), (len(asked), _FEW), (_ALONE, 1)):
            name = f"{label}, {width} at a time"
            answers.append(ask(server, asked[:num_asked], width, name, sampling))
            requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
        return cls(label, *answers)

    def agrees_with(self, found: Sequence[Spoken], label: str) -> bool:
        """Whether another server's answers differ by no more than batching explains. Prints the
        differences."""
        by_batch = max(
            report(f"{_FEW} at a time, {self.label}", self.many, self.few)[1],
            report(f"one by one, {self.label}", self.many, self.alone)[1],
        )
        # Maxima of rounding errors, over more answers and over fewer.
        allowed = 2 * by_batch
        num_parted, largest = report(label, self.many, found, allowed)
        return num_parted == 0 and largest <= allowed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=300, help="default: %(default)s")
    parser.add_argument(
        "--policy", choices=RESTLESS, default="fastserve", help="default: %(default)s"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--page-size", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--no-overlap", action="store_true", help="--disable-overlap-schedule")
    parser.add_argument("--apart", action="store_true", help="prefill and decode on two servers")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--mla", action="store_true", help="a model with latent attention")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server-flags", type=shlex.split, default=[], help="SGLang's, for both")
    parser.add_argument(
        "--real", action="store_true",
        help="a real language model, which ends its answers itself (docs/benchmarking.md)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        return measure(args)
    except ServerError as error:
        print(f"exactness: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    """Run both servers, print the comparison, and return the exit code."""
    restless = RESTLESS[args.policy]
    attention = "mla" if args.mla else "mha"
    on_cpu = args.device == "cpu"
    host = CPU_ENGINE_FLAGS if on_cpu else ("--mem-fraction-static", "0.1")
    if args.real:
        model = fetch()
        asked, starved_pool = chats(args.num_requests, model), _STARVED_BY_CHATS
        ended = tuple({**sampling, "ignore_eos": False} for sampling in restless.sampling)
        restless = replace(restless, sampling=ended)
    else:
        asked, starved_pool = crowd(args.num_requests), _STARVED
        model = write_model(
            _OUTPUT / f"model-{attention}-{args.dtype}-{args.device}",
            dtype=args.dtype,
            latent_attention=args.mla,
            hidden_size=128 if on_cpu else _GPU_HIDDEN_SIZE,
        )
    servers = PolicyServers(
        model=model,
        folder=_OUTPUT,
        flags=(
            *host, "--dtype", args.dtype, "--page-size", str(args.page_size),
            "--tp-size", str(args.tp),
            *(("--disable-overlap-schedule",) if args.no_overlap else ()),
            *args.server_flags,
        ),
        env=(CPU_ENV if on_cpu else {}) | STRICT | (TWO_RANKS if args.tp == 2 else {}),
        sage=restless.config,
    )  # fmt: skip
    with replace(servers, flags=servers.flags + _ROOMY).server("fcfs", "calm") as server:
        ends = restless.sampling[:1] if args.real else ({},)
        calm = Undisturbed.ask(server, asked, restless.at_a_time, "no preemption", ends)
    slots = ("--max-running-requests", str(restless.num_slots))
    starved = replace(servers, flags=servers.flags + starved_pool + slots)
    with (
        starved.server(args.policy, "yielding")
        if not args.apart
        else _pair(starved, args.policy) as server
    ):
        found = ask(server, asked, restless.at_a_time, "preempted", restless.sampling)
        yielding = server.decode if isinstance(server, Pair) else server
        counts = scheduler_state(yielding)["preemption"]
    num_recomputed = sum(answer.num_retractions for answer in found) - counts["num_preemptions"]
    print(
        f"{len(asked)} requests, {sum(len(answer.ids) for answer in found)} tokens, "
        f"{args.policy}, {args.dtype}, {attention.upper()}, "
        f"pages of {args.page_size}, {'no overlap' if args.no_overlap else 'overlap'}, "
        f"{args.tp} rank(s)\n"
        f"{counts['num_preemptions']} preemptions, {counts['num_resumed']} swapped in, "
        f"{num_recomputed + counts['num_recomputed']} recomputed, "
        f"{counts['swapped_bytes'] / 1e6:.1f} MB moved"
    )
    agrees = calm.agrees_with(found, "preempted")
    if counts["num_preemptions"] < restless.least_yields * len(asked):
        print("exactness: too few requests were preempted for a meaningful check", file=sys.stderr)
        return 2
    return int(not agrees)


def _pair(starved: PolicyServers, policy: str) -> Pair[Server]:
    """Return two servers, both short of memory."""
    env = {**starved.env, **mooncake_stand_in.install(_OUTPUT / "plugins")}

    def start(mode: str, flags: Sequence[str]) -> Server:
        return replace(starved, env=env, flags=(*starved.flags, *flags)).server(policy, mode)

    return Pair(start)


if __name__ == "__main__":
    sys.exit(main())
