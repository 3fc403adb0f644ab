"""Runs the cases, each with every seed, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tqdm import tqdm

from bench.arrivals import bursty_arrivals, poisson_arrivals
from bench.paper.cases import DATASETS, Case
from bench.predictions import Foresight, Predict, truth, with_noise
from bench.rival import Rival
from bench.simulator.presets import PRESETS
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from bench.workload import Request, sample
from sage_sched.config import PredictorConfig
from sage_sched.policy import policy_named

MAX_NEW_TOKENS = 4096
# "long prompts": those of summarization, as long as if whole papers were to be summarized.
LONG_PROMPT_FACTOR = 16

PREDICTORS: dict[str, Callable[[Foresight, PredictorConfig], Predict]] = {
    "semantic": lambda foresight, config: foresight.semantic(config),
    "threshold alone": lambda foresight, config: foresight.semantic(
        replace(config, rule="threshold")
    ),
    "input length": lambda foresight, config: foresight.of_input_length(),
    "none": lambda foresight, config: foresight.blind(),
    "truth": lambda foresight, config: truth,
}


# The names of bench.simulator.result.Result.metrics.
Outcome = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """foresight: what has read every prompt that is used. num_requests: a run."""

    foresight: Foresight
    num_requests: int

    @cached_property
    def _evaluation(self) -> Sequence[Request]:
        return self.foresight.workload.evaluation

    def requests(self, case: Case, seed: int) -> list[SimRequest]:
        """The requests of a run: those of a case's dataset, rate and seed, whatever its policy."""
        chosen = self._sample(case.dataset, seed)
        factor = LONG_PROMPT_FACTOR if case.dataset == "long prompts" else 1
        predict = self._predict(case)
        if case.variation == 1:
            arrivals = poisson_arrivals(len(chosen), seed) / case.rate
        else:
            arrivals = bursty_arrivals(len(chosen), seed, case.variation) / case.rate
        return [
            SimRequest(
                arrival_s=float(arrival_s),
                input_tokens=factor * self.foresight.input_tokens(request),
                output_tokens=min(request.output_tokens, MAX_NEW_TOKENS),
                max_new_tokens=MAX_NEW_TOKENS,
                distribution=predict(request),
                class_name=request.class_name,
            )
            for arrival_s, request in zip(arrivals, chosen, strict=True)
        ]

    def drawn(self, cases: Sequence[Case], num_seeds: int) -> list[Request]:
        """Whatever any of these runs draws; some more than once."""
        datasets = dict.fromkeys(case.dataset for case in cases)
        return [
            r for dataset in datasets for s in range(num_seeds) for r in self._sample(dataset, s)
        ]

    def _sample(self, dataset: str, seed: int) -> list[Request]:
        wanted = {"mixed": DATASETS, "long prompts": ("summarization",)}
        classes = wanted.get(dataset, (dataset,))
        pool = [request for request in self._evaluation if request.class_name in classes]
        return sample(pool, self.num_requests, seed, at_most=True)

    def _predict(self, case: Case) -> Predict:
        policy = Rival.parse(case.policy).policy
        if policy in STOCK:
            return lambda request: None
        if policy_named(policy).clairvoyant:
            return truth
        predict = PREDICTORS[case.predictor](self.foresight, case.config.predictor)
        return with_noise(predict, MAX_NEW_TOKENS) if case.noise else predict

    def outcome(self, job: tuple[Case, int]) -> Outcome:
        """One run."""
        case, seed = job
        engine = replace(PRESETS[case.engine], **dict(case.change))  # type: ignore[arg-type]
        requests = self.requests(case, seed)
        options = Options(preempt=case.preempt)
        return simulate(engine, case.policy, case.config, requests, options).metrics()


def run_all(
    evaluation: Evaluation, cases: Sequence[Case], num_seeds: int
) -> dict[tuple[Case, int], Outcome]:
    """Every distinct case with seeds 0 to num_seeds - 1."""
    jobs = [(case, seed) for case in dict.fromkeys(cases) for seed in range(num_seeds)]
    # Forked, so that prompts' vectors are there without being sent.
    context = multiprocessing.get_context("fork")
    num_cores = len(os.sched_getaffinity(0))
    with context.Pool(num_cores, _remember, (evaluation,)) as pool:
        outcomes = tqdm(
            pool.imap(_outcome, jobs, chunksize=4),
            total=len(jobs), desc="simulating", unit="run",
        )  # fmt: skip
        return dict(zip(jobs, outcomes, strict=True))


_remembered: list[Evaluation] = []  # in each process of the pool


def _remember(evaluation: Evaluation) -> None:
    _remembered[:] = [evaluation]


def _outcome(job: tuple[Case, int]) -> Outcome:
    return _remembered[0].outcome(job)
