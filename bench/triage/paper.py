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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.triage.requests import read_logged, read_triage
from bench.triage.spikes import NUM_LEVELS, POLICIES, Case, Logged, waited
from bench.workloads.prompts import WorkloadError
from predictor_store.arguments import at_least_one
from predictor_store.data.dataset_files import DatasetError

_ERRORS = (0.1, 0.3, 0.5, 0.7, 0.9)
_LATENCIES_S, _BATCHES = (0.001, 0.01, 0.1, 1.0), (4, 16, 32, 64)
_CONCURRENT = (5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class Figure:
    """rows: a label and its cases, one a column group. level: shown alone; None: all of them."""

    title: str
    says: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Case, ...]], ...]
    level: int | None = None


_LEVELS = (*(f"urgency {level}" for level in range(NUM_LEVELS)), "all")


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
