"""The simulations of "Semantic Scheduling for LLM Inference", re-run: `python -m bench.triage.paper
--data DIR`.

The requests are those of its authors' logs (semsched_priority_lengths): 238, with levels and
lengths that do not depend on each other. Every gap_s seconds one to so many of them come at once.
As there, levels and lengths are foreseen by a truth in which errors are injected: with probability
e it is off by about e times the number of levels, or of buckets of 100 tokens. Waiting is counted
for each token of the answer, as in `bench urgency`, from when a request came, so what its
predictors take is in it.

What the paper leaves open is taken from ours: the engine is the preset of its appendix B for
Qwen1.5-7B on an A100 (its main figures are of Qwen1.5-4B, of which it prints a prefill that would
take a quarter of an hour), slots and memory are the preset's, and what is not varied has no errors
and takes no time. Its Fig. 3 is of recordings that are not public; here it has the triage prompts'
levels. Nothing was tuned to come near its numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.triage.requests import read_logged, read_triage
from bench.workload.prompts import WorkloadError
from predictor_store.arguments import at_least_one
from predictor_store.dataset_files import DatasetError
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.policies.urgency import Urgency, UrgencyParameters
from sage_sched.policy import Policy

_ENGINE = PRESETS["a100-qwen1.5-7b"]
_NUM_LEVELS = _NUM_BUCKETS = 5
_BUCKET_TOKENS = 100
_ERRORS = (0.1, 0.3, 0.5, 0.7, 0.9)
_LATENCIES_S, _BATCHES = (0.001, 0.01, 0.1, 1.0), (4, 16, 32, 64)
_CONCURRENT = (5, 10, 20, 50, 100)
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
    length_error: see above. latency_s: of the predictor, for each `batch` of requests, which it
    waits for; 1: immediate processing."""

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
    of_levels = [per_token_s[level == one].mean() for one in range(_NUM_LEVELS)]
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
    off = max(1, round(_NUM_LEVELS * error))
    sign = rng.choice((-1, 1), len(truth))
    last = _NUM_LEVELS - 1
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


@dataclass(frozen=True, slots=True)
class Figure:
    """rows: a label and its cases, one a column group. level: shown alone; None: all of them."""

    title: str
    says: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Case, ...]], ...]
    level: int | None = None


_LEVELS = (*(f"urgency {level}" for level in range(_NUM_LEVELS)), "all")


def figures() -> dict[str, Figure]:
    """By their names there; t1 and t2 are its tables."""
    batches = {"full batching": 64, "immediate": 1}
    return {
        "2a": Figure(
            "Errors of the urgency predictor",
            "0.1 to 0.9: urgency 0 from 0.02 to 0.07, 1 from 0.03 to 0.22, all from 0.13 to 0.12",
            _LEVELS,
            tuple((f"error {e:g}", (Case(level_error=e),)) for e in _ERRORS),
        ),
        "2b": Figure(
            "Errors of the length predictor",
            "0.1 to 0.9: urgency 0 at 0.01, 1 from 0.03 to 0.04, 2 from 0.08 to 0.11, 3 from 0.18 "
            "to 0.21, 4 from 0.30 to 0.33",
            _LEVELS,
            tuple((f"error {e:g}", (Case(length_error=e),)) for e in _ERRORS),
        ),
        "2c": _spikes(0.1, "at 100, 0.08, and 1.7, 6.1 and 8.7 times that under HPJF, SJF and "
                      "FCFS; Qwen1.5-7B: up to 0.18, and 6.5 times that"),
        "2d": _spikes(1.0, "up to 9.1 times less than all others; Qwen1.5-7B: up to 0.16, and 6.6 "
                      "times that"),
        "t1": Figure(
            "Table 1: the predictor's latency, in batches of 64 and at once",
            "0.001 to 1 s, at once: urgency 0 from 0.01 to 0.37, all from 0.04 to 2.56; batches: "
            "0.07 to 0.35, 0.21 to 2.46",
            _LEVELS,
            tuple(
                (f"{name}, {latency:g} s", (Case(latency_s=latency, batch=batch),))
                for name, batch in batches.items()
                for latency in _LATENCIES_S
            ),
        ),
        "t2": Figure(
            "Table 2: batches of the predictor, which takes 0.01 s",
            "4 to 64: urgency 0 from 0.07 to 0.08, all from 0.58 to 0.60; at once 0.07 and 0.58",
            _LEVELS,
            tuple((f"batches of {b}", (Case(latency_s=0.01, batch=b),)) for b in (1, *_BATCHES)),
        ),
        "3": Figure(
            "Triage prompts: urgency 1 (of 0 there are 13), gaps of 0.1 and 1 s",
            "urgency 0, a gap of 0.1 s: 6.69 at 5, 15.52 at 100, up to 19.2 times that under FCFS; "
            "a gap of 1 s: 0.32 at 5, 167 times that",
            tuple(f"{p}, {gap:g} s" for gap in (0.1, 1.0) for p in ("fcfs", "semantic")),
            tuple(
                (
                    f"up to {most} at once",
                    tuple(Case(p, gap, most) for gap in (0.1, 1.0) for p in ("fcfs", "semantic")),
                )
                for most in (5, 100)
            ),
            level=1,
        ),
    }  # fmt: skip


def _spikes(gap_s: float, says: str) -> Figure:
    return Figure(
        f"Spikes, a gap of {gap_s:g} s: urgency 0",
        says,
        tuple(POLICIES),
        tuple(
            (f"up to {most} at once", tuple(Case(policy, gap_s, most) for policy in POLICIES))
            for most in _CONCURRENT
        ),
        level=0,
    )


def lines(figure: Figure, logged: Logged, num_seeds: int) -> Iterator[str]:
    """Its table, row by row: means over seeds."""
    yield f"\n### {figure.title}\n\nThe paper: {figure.says}.\n"
    yield f"| seconds waited a token | {' | '.join(figure.columns)} |"
    yield f"|{'---|' * (1 + len(figure.columns))}"
    for label, cases in figure.rows:
        means = [
            np.mean([waited(logged, case, seed) for seed in range(num_seeds)], axis=0)
            for case in cases
        ]
        shown = means[0] if figure.level is None else [mean[figure.level] for mean in means]
        yield f"| {label} | {' | '.join(f'{value:.3g}' for value in shown)} |"


def _logged(folder: Path, name: str) -> Logged:
    """Whose levels count, one request each."""
    rows = read_logged(folder)
    if name != "3":
        return Logged(*rows.T)
    triage = read_triage(folder)
    drawn = np.random.default_rng(0).integers(len(rows), size=len(triage.expert))
    return Logged(triage.expert - 1, *rows[drawn, 1:].T)


def main(argv: Sequence[str] | None = None) -> int:
    known = figures()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=at_least_one, default=5, help="default: %(default)s")
    parser.add_argument("--figures", nargs="+", choices=known, default=[*known], metavar="NAME")
    args = parser.parse_args(argv)
    try:
        for name in args.figures:
            for line in lines(known[name], _logged(args.data, name), args.seeds):
                print(line, flush=True)
    except (WorkloadError, DatasetError) as error:
        print(f"bench.triage.paper: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
