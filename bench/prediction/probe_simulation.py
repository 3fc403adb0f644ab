"""What a probe would be worth to schedules on prompts whose answers nobody has the states of.

    python -m bench.prediction.probe_simulation --data DIR

Simulated, with scores that are drawn by true lengths (bench.prediction.probe_noise): with the error
that TRAIL reports (its refined forecast is 2.66 times less off than the prompt's), with more and
less, and, with --model and its probes, as these said of answers in the plan language. How much
scores count is fitted on prompts of their own. Ratios are of mean times to the last token and of
their 99th percentiles, medians over seeds with bootstrapped 95 % intervals.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.paper.cases import Case
from bench.paper.runs import Evaluation
from bench.prediction.foresight import Foresight, token_counter
from bench.prediction.plan_recording import plan_answers
from bench.prediction.plan_simulation import POLICIES, Means, mean_and_tail, print_table
from bench.prediction.plan_states import read_answers
from bench.prediction.probe_noise import (
    Floats,
    LogNormal,
    Replayed,
    errors,
    reading_of,
    spread_of,
)
from bench.workloads.prompts import Workload
from bench.workloads.source import load_workload
from predictor_store.probe.probe_file import ProbeFile
from predictor_store.probe.probe_weights import weighed
from predictor_store.probe.recording import Recording
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import PredictorConfig, SageConfig
from sage_sched.probe.posterior import Reading, is_due

_NUM_FITTED = 200
_ENGINE = "h800-qwen3-32b"
_BOUNDS: dict[str, tuple[tuple[str, float], ...]] = {
    "slots": (("max_running_requests", 16),),
    "KV memory": (("kv_pool_tokens", 16_384),),
}
_NUM_REPLAYED = 400
# Of a length and its errors at each age.
Scores = Callable[[int, Floats], Floats]
# Of "trail", and of "sage+".
Sources = dict[str, tuple[Scores, Reading]]


def with_scores(requests: Sequence[SimRequest], scores: Scores, seed: int) -> list[SimRequest]:
    """The same requests, with what a probe says of each."""
    told = []
    for number, request in enumerate(requests):
        drawn = errors(request.output_tokens, np.random.default_rng([seed, number, 7]))
        rows = scores(request.output_tokens, drawn)
        told.append(replace(request, scores=dict(enumerate(rows))))
    return told


def fitted(requests: Sequence[SimRequest], scores: Scores, reading: Reading) -> Reading:
    """With the alpha, beta and gamma that suit such scores of these requests."""
    rows: list[Floats] = []
    ages: list[int] = []
    answer: list[int] = []
    for number, request in enumerate(requests):
        drawn = errors(request.output_tokens, np.random.default_rng([number, 8]))
        said = scores(request.output_tokens, drawn)
        due = [age for age in range(request.output_tokens) if is_due(age)]
        rows += [said[age] for age in due]
        ages += due
        answer += [number] * len(due)
    forecasts = [request.distribution for request in requests if request.distribution is not None]
    number = len(requests)
    recording = Recording(
        layers=(0,),
        fingerprint="",
        states=np.zeros((len(rows), 1, 0), np.float16),
        ages=np.array(ages),
        answer=np.array(answer),
        lengths=np.array([request.output_tokens for request in requests]),
        is_cut=np.zeros(number, np.bool_),
        prompts=np.arange(number, dtype=np.uint64),
        caps=np.array([request.max_new_tokens for request in requests]),
        forecasts=tuple(forecasts),
    )
    return weighed(recording, np.array(rows), reading, np.ones(len(rows), np.bool_))


def means_of(
    evaluation: Evaluation,
    bound: str,
    rate: float,
    policies: Sequence[str],
    scores: Sources,
    num_seeds: int,
) -> Means:
    """Mean and 99th percentile of the time to the last token in seconds, by policy and seed."""
    engine = replace(PRESETS[_ENGINE], **dict(_BOUNDS[bound]))  # type: ignore[arg-type]
    means: Means = {policy: [] for policy in policies}
    for seed in range(num_seeds):
        for policy in policies:
            case = Case(policy=policy, change=_BOUNDS[bound], rate=rate, of_capacity=True)
            said, reading = scores["trail" if policy == "trail" else "sage+"]
            requests = evaluation.requests(case, seed)
            options = Options(preempt=True)
            if policy in ("trail", "sage+"):
                requests = with_scores(requests, said, seed)
                options = replace(options, reading=reading)
            result = simulate(engine, policy, SageConfig(), requests, options)
            means[policy].append(mean_and_tail(result))
    return means


def main() -> None:
    """A table for each kind of scores, bound and load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="default: generated prompts")
    parser.add_argument("--ratios", type=float, nargs="*", default=[2.66], help="see the module")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the plan language's")
    parser.add_argument("--probe", type=Path, metavar="FILE")
    parser.add_argument("--trail-probe", type=Path, metavar="FILE")
    parser.add_argument("--skip", type=int, default=1200, help="answers that were recorded")
    parser.add_argument("--bounds", nargs="+", choices=_BOUNDS, default=[*_BOUNDS])
    parser.add_argument("--rate", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--num-requests", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    args = parser.parse_args()
    define_missing()
    workload = load_workload(args.data)
    mixed = np.random.default_rng(0).permutation(len(workload.evaluation))
    apart = [workload.evaluation[i] for i in mixed]
    fit, rest = apart[:_NUM_FITTED], apart[_NUM_FITTED:]
    workload = Workload(workload.history, tuple(rest), workload.description)
    foresight = Foresight(workload, PredictorConfig(), token_counter())
    evaluation = Evaluation(foresight, args.num_requests)
    evaluation.read([Case(policy="sage")], args.seeds)
    foresight.read(fit)
    known = Evaluation(replace(foresight, workload=replace(workload, evaluation=tuple(fit))), 120)
    sample = known.requests(Case(policy="sage"), 0)
    lengths = np.array([request.output_tokens for request in sample])
    prompt_means = np.array([r.distribution.mean() for r in sample if r.distribution is not None])
    kinds = [(f"error {ratio:g} times less than the prompt's", ratio) for ratio in args.ratios]
    if args.model is not None:
        kinds.append(("replayed", math.nan))
    for name, ratio in kinds:
        if math.isnan(ratio):
            scores = _replayed(args)
        else:
            scores = _log_normal(lengths, spread_of(ratio, lengths, prompt_means))
        says, reading = scores["sage+"]
        scores["sage+"] = says, (reading := fitted(sample, says, reading))
        print(f"\n{name}: alpha {reading.alpha:g}, beta {reading.beta}, gamma {reading.gamma:g}")
        for bound in args.bounds:
            means = means_of(evaluation, bound, args.rate, args.policies, scores, args.seeds)
            print(f"\n{bound}, {args.rate:g} times what fcfs serves\n")
            print_table(means)


def _log_normal(lengths: NDArray[np.int64], spread: float) -> Sources:
    readings = {"sage+": reading_of("log", lengths), "trail": reading_of("trail", lengths)}
    longest = int(lengths.max())
    return {name: (LogNormal(r, spread, longest), r) for name, r in readings.items()}


def _replayed(args: argparse.Namespace) -> Sources:
    probes = [ProbeFile.read(args.probe), ProbeFile.read(args.trail_probe)]
    rows = plan_answers(args.model)[args.skip : args.skip + _NUM_REPLAYED]
    reads = [*zip(*read_answers(args.model, rows, probes), strict=True)]
    lengths = [len(row["tokens"]) for row in rows]
    return {
        name: (Replayed(probe.reading, lengths, read), probe.reading)
        for name, probe, read in zip(("sage+", "trail"), probes, reads, strict=True)
    }


if __name__ == "__main__":
    main()
