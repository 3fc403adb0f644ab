"""Runs the cases, each with every seed, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.engines.baseline import Saturation
from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.engines.simulator.stock import STOCK
from bench.paper.cases import DATASETS, Case
from bench.policies.srpt_oracle import ORACLE
from bench.rival import Rival
from bench.workloads.arrivals import PULSE_REQUESTS, arrivals_of, num_requests_of
from bench.workloads.foresight import (
    Foresight,
    Predict,
    heavy_tailed,
    truth,
    with_factor,
    with_heavy_tail,
    with_noise,
)
from bench.workloads.prompts import WorkloadRequest, sample
from sage_sched.config import PredictorConfig

MAX_NEW_TOKENS = 4096
# What a request waits for its prediction on a server, at most (`python -m bench.overhead.stages`).
PREDICTION_DELAY_S = 0.002
# "long prompts": those of summarization, as long as if whole papers were to be summarized.
LONG_PROMPT_FACTOR = 16

Prepare = Callable[[Foresight, PredictorConfig], Predict]


def _threshold(cosine: float) -> Prepare:
    return lambda foresight, config: foresight.of_threshold(cosine)


PREDICTORS: dict[str, Prepare] = {
    "semantic": lambda foresight, config: foresight.semantic(config),
    "threshold alone": _threshold(0.8),
    "input length": lambda foresight, config: foresight.of_input_length(),
    "none": lambda foresight, config: foresight.blind(),
    "truth": lambda foresight, config: truth,
    **{f"threshold {cosine:g}": _threshold(cosine) for cosine in (0.5, 0.6, 0.7, 0.8, 0.9)},
}


# The names of bench.engines.simulator.result.Result.metrics.
Outcome = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """foresight: what has read every prompt that is used. num_requests: a run, if not sustained."""

    foresight: Foresight
    num_requests: int

    def requests(self, case: Case, seed: int) -> list[SimRequest]:
        """The requests of a run: those of a case's dataset, load and seed, whatever its policy."""
        return self._sent(case, *self.chosen(case, seed))

    def chosen(self, case: Case, seed: int) -> tuple[list[WorkloadRequest], NDArray[np.float64]]:
        """What is asked, and when.

        Sustained load may have more of them than there are prompts. Then prompts come again, which
        the history here does not learn from.
        """
        chosen, rate = self._sample(case.dataset, seed), case.rate
        if case.heavy_tailed:
            chosen = heavy_tailed(chosen, seed)
        if case.of_capacity or case.load == "sustained":
            saturated = self._saturated(case)
            rate *= saturated.capacity if case.of_capacity else 1.0
            if case.load == "sustained":
                wanted = num_requests_of(case.load, rate, saturated.service_s)
                order = np.random.default_rng([seed, 3])
                prompts = chosen
                while len(chosen) < wanted:
                    again = order.permutation(len(prompts))
                    chosen = [*chosen, *(prompts[i] for i in again)]
                chosen = chosen[:wanted]
        arrivals_s = arrivals_of(case.load, len(chosen), seed) / rate
        return chosen, arrivals_s

    def _saturated(self, case: Case) -> Saturation:
        """What fcfs sustains on the case's engine, from a burst of the history's requests, so that
        it is the same for all seeds."""
        case = replace(case, policy="fcfs", preempt=False)
        pool = self._of_dataset(self.foresight.workload.history, case.dataset)
        chosen = sample(pool, PULSE_REQUESTS, seed=1, at_most=True)
        if case.heavy_tailed:
            chosen = heavy_tailed(chosen, seed=1)
        result = self._simulated(case, self._sent(case, chosen, np.zeros(len(chosen))))
        return Saturation.measured(result.ttft_s, result.ttlt_s)

    def _sent(
        self, case: Case, chosen: Sequence[WorkloadRequest], arrivals_s: NDArray[np.float64]
    ) -> list[SimRequest]:
        factor = LONG_PROMPT_FACTOR if case.dataset == "long prompts" else 1
        predict = self._predict(case)
        return [
            SimRequest(
                arrival_s=float(arrival_s),
                input_tokens=factor * self.foresight.input_tokens(request),
                output_tokens=min(request.output_tokens, MAX_NEW_TOKENS),
                max_new_tokens=MAX_NEW_TOKENS,
                distribution=predict(request),
                class_name=request.class_name,
            )
            for arrival_s, request in zip(arrivals_s, chosen, strict=True)
        ]

    def read(self, cases: Sequence[Case], num_seeds: int) -> None:
        """Embed what these runs draw, by each encoder that one of them uses."""
        drawn = self._drawn(cases, num_seeds)
        encoders = {case.config.predictor.encoder for case in cases}
        if any(case.predictor.startswith("threshold") for case in cases):
            encoders.add("minilm")
        for encoder in sorted(encoders):
            self.foresight.read(drawn, encoder)

    def _drawn(self, cases: Sequence[Case], num_seeds: int) -> list[WorkloadRequest]:
        """Whatever any of these runs draws; some more than once."""
        datasets = dict.fromkeys(case.dataset for case in cases)
        return [
            r for dataset in datasets for s in range(num_seeds) for r in self._sample(dataset, s)
        ]

    def _sample(self, dataset: str, seed: int) -> list[WorkloadRequest]:
        pool = self._of_dataset(self.foresight.workload.evaluation, dataset)
        return sample(pool, self.num_requests, seed, at_most=True)

    def _of_dataset(
        self, requests: Sequence[WorkloadRequest], dataset: str
    ) -> list[WorkloadRequest]:
        wanted = {"mixed": DATASETS, "long prompts": ("summarization",)}
        classes = wanted.get(dataset, (dataset,))
        return [request for request in requests if request.class_name in classes]

    def _predict(self, case: Case) -> Predict:
        policy = Rival.parse(case.policy).policy
        if policy in STOCK:
            return lambda request: None
        if policy == ORACLE:
            return truth
        predict = PREDICTORS[case.predictor](self.foresight, case.config.predictor)
        if case.heavy_tailed:
            predict = with_heavy_tail(predict)
        if case.wrong_by != 1:
            predict = with_factor(predict, case.wrong_by)
        return with_noise(predict, MAX_NEW_TOKENS) if case.noise else predict

    def outcome(self, job: tuple[Case, int]) -> Outcome:
        """One run."""
        case, seed = job
        return self.outcome_of(case, self.requests(case, seed))

    def outcome_of(self, case: Case, requests: Sequence[SimRequest]) -> Outcome:
        """The same on requests that are given."""
        return self._simulated(case, requests).metrics()

    def _simulated(self, case: Case, requests: Sequence[SimRequest]) -> Result:
        engine = replace(PRESETS[case.engine], **dict(case.change))  # type: ignore[arg-type]
        options = Options(preempt=case.preempt, prediction_delay_s=PREDICTION_DELAY_S)
        return simulate(engine, case.policy, case.config, requests, options)


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
