"""How well what is left of an answer is foretold, by age, in the plan language.

    python -m bench.prediction.plan_quality --model results/plan --probe F --trail-probe F

Answers that no probe was trained on. From the prompt: its forecast less the age (the paper's BERT),
and its forecast given the age. From hidden states: the probe of TRAIL's bins as it is, through the
filter as printed and as its text has it, and sage+'s posterior. At the end of the scale, the exact
filter, which knows the language. And a control: posterior whose scores are another answer's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.server.plan_model import plan_words
from bench.prediction.foresight import Foresight
from bench.prediction.plan_recording import CAP_TOKENS, plan_answers, plan_history
from bench.prediction.plan_states import read_answers
from bench.workloads.plan_language import Reader
from bench.workloads.prompts import Workload, WorkloadRequest
from predictor_store.probe.probe_file import ProbeFile
from predictor_store.probe.probe_score import AGES, Forecast, crps, quality_by_age
from predictor_store.probe.probe_weights import middles_of, without_scores
from predictor_store.probe.train_probe_command import table
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import PredictorConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.probe.posterior import Posterior, Reading, is_due
from sage_sched.probe.trail_filter import filtered, filtered_as_printed

Floats = NDArray[np.float64]


def forecasts_of_prompts(prompts: Sequence[str]) -> list[LengthDistribution]:
    """By the history's neighbours, as a server makes them."""
    foresight = Foresight(Workload(tuple(plan_history()), (), ""), PredictorConfig(), len)
    asked = [WorkloadRequest(prompt, 1, "") for prompt in prompts]
    foresight.read(asked)
    found, predict = [], foresight.semantic()
    for request in asked:
        known = predict(request)
        assert known is not None
        found.append(known)
    return found


def of_prompt(length: int, known: LengthDistribution) -> dict[str, list[Forecast]]:
    """The prompt's forecast at each age of an answer of this length."""
    tailed = known.with_tail(CAP_TOKENS)
    less, given = list[Forecast](), list[Forecast]()
    for age in (age for age in AGES if age < length):
        left = tailed.surviving(age)
        shifted = np.maximum(tailed.lengths - age, 1).astype(np.float64)
        less.append((age, length - age, shifted, tailed.weights))
        if left is None:
            given.append((age, length - age, np.array([float(age)]), np.ones(1)))
        else:
            given.append((age, length - age, (left.lengths - age).astype(float), left.weights))
    return {"prompt, less the age": less, "prompt, given the age": given}


def of_filters(length: int, log_p: Floats, width: float) -> dict[str, list[Forecast]]:
    """TRAIL's probe at each age: as it is, and through its filter in both forms."""
    middles = np.asarray(width * (np.arange(log_p.shape[1]) + 0.5), np.float64)
    found: dict[str, list[Forecast]] = {
        "raw": [],
        "filter as printed": [],
        "filter by its text": [],
    }
    p = np.exp(log_p)
    prior = prose = printed = p[0]
    for age in range(length):
        if age:
            prior, printed = filtered_as_printed(prior, p[age], width)
            prose = filtered(prose, p[age], width)
        if age in AGES:
            for name, q in zip(found, (p[age], printed, prose), strict=True):
                found[name].append((age, length - age, middles, q))
    return found


def of_probe(length: int, log_p: Floats, reading: Reading) -> dict[str, list[Forecast]]:
    """The posterior's probe alone, its bins at their middles."""
    middles = middles_of(reading.edges)
    at_ages = (age for age in AGES if age < length)
    return {"probe, alone": [(age, length - age, middles, np.exp(log_p[age])) for age in at_ages]}


def of_posterior(
    length: int, known: LengthDistribution, log_p: Floats, reading: Reading
) -> list[Forecast]:
    """sage+'s at each age."""
    rule, job = Posterior(reading), Job(0, 1, CAP_TOKENS, known, 0)
    found = []
    for age in range(min(length, len(log_p))):
        if is_due(age):
            rule.refine([job], [age], log_p[age : age + 1])
            if age in AGES and job.refined is not None:
                left = job.refined.lengths - age
                found.append((age, length - age, left, job.refined.weights))
    return found


def of_reader(tokens: Sequence[int], kind: int) -> list[Forecast]:
    """The exact filter's."""
    reader, found = Reader(plan_words(), kind), []
    for age in range(len(tokens)):
        if age in AGES:
            chance = reader.remaining()
            left = np.arange(chance.size, dtype=np.float64)
            found.append((age, len(tokens) - age, left, chance / chance.sum()))
        if age > max(AGES):
            break
        reader.read(tokens[age])
    return found


def measured(
    rows: Sequence[dict[str, Any]],
    known: Sequence[LengthDistribution],
    reads: Sequence[Sequence[Floats]],
    reading: Reading,
    width: float,
) -> dict[str, list[Forecast]]:
    """All of it. reads: of each row, what the posterior's probe and TRAIL's say."""
    found: dict[str, list[Forecast]] = {}

    def add(more: dict[str, list[Forecast]]) -> None:
        for name, forecasts in more.items():
            found.setdefault(name, []).extend(forecasts)

    shuffled = np.random.default_rng(0).permutation(len(rows))
    without = without_scores(reading)
    for number, row in enumerate(rows):
        length, forecast = len(row["tokens"]), known[number]
        log_p, trail_log_p = reads[number]
        add(of_prompt(length, forecast))
        add({"posterior, beta 0": of_posterior(length, forecast, log_p, without)})
        add(of_filters(length, trail_log_p, width))
        add(of_probe(length, log_p, reading))
        add({"sage+": of_posterior(length, forecast, log_p, reading)})
        add({"exact filter": of_reader(row["tokens"], row["kind"])})
        other = reads[shuffled[number]][0]
        add({"control: another's scores": of_posterior(length, forecast, other, reading)})
    return found


def share_closed(found: dict[str, list[Forecast]], age: int) -> tuple[float, float, float]:
    """Of the prompt's CRPS over the exact filter's, the share that sage+ is rid of at an age, and
    its 95 % interval, by resampling answers (the prompts are all distinct)."""
    kinds = ("prompt, given the age", "sage+", "exact filter")
    at_age = [
        np.array(
            [crps(left, lengths, weights) for a, left, lengths, weights in found[kind] if a == age]
        )
        for kind in kinds
    ]
    rng = np.random.default_rng(0)

    def share(some: NDArray[np.int64]) -> float:
        prompt, ours, floor = (float(scores[some].mean()) for scores in at_age)
        return (prompt - ours) / (prompt - floor)

    number = len(at_age[0])
    shares = [share(rng.integers(number, size=number)) for _ in range(1000)]
    low, high = np.percentile(shares, [2.5, 97.5])
    return share(np.arange(number)), float(low), float(high)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--probe", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trail-probe", type=Path, required=True, metavar="FILE")
    parser.add_argument("--skip", type=int, default=2000, help="answers that were recorded")
    parser.add_argument("--answers", type=int, default=400)
    args = parser.parse_args()
    define_missing()
    probes = [ProbeFile.read(args.probe), ProbeFile.read(args.trail_probe)]
    rows = plan_answers(args.model)[args.skip : args.skip + args.answers]
    known = forecasts_of_prompts([row["prompt"] for row in rows])
    reads = [*read_answers(args.model, rows, probes)]
    width = float(probes[1].reading.edges[1])
    found = measured(rows, known, reads, probes[0].reading, width)
    print(table({name: quality_by_age(forecasts) for name, forecasts in found.items()}))
    for age in AGES:
        share, low, high = share_closed(found, age)
        print(f"age {age}: sage+ closes {share:.0%} ({low:.0%} to {high:.0%}) of the CRPS gap")


if __name__ == "__main__":
    main()
