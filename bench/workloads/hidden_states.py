"""A real model's own answers, each with what a probe says of it as it grows (TRAIL)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.policies.arm import Arm
from bench.policies.rival import Rival
from bench.policies.srpt_oracle import ORACLE
from bench.real_model.answers import answers_folder, read_answers
from bench.real_model.recording import complete
from bench.simulator.request import SimRequest
from bench.simulator.scores import Scores
from bench.simulator.stock import STOCK
from bench.workloads.prompts import WorkloadError, stable_hash
from bench.workloads.source import Purpose, Source
from predictor_store.probe.recording import Recording
from predictor_store.probe.training import RECIPES, train
from sage_sched.distribution import LengthDistribution
from sage_sched.probe import from_steps, in_steps

_RECIPES = {"sage+": "log", "trail": "trail"}
# The middle ones read best (docs/real-model.md); training on all thirty takes ten times as long.
_LAYERS = (13, 16, 19, 22)


class HiddenStates(Source):
    """The answers that bench.real_model.answers --states kept.

    Each seed has probes of its own, trained on 70 % of the prompts, chosen by 10 % (tuning draws
    from these), and asked for the 20 % that are left. A policy without a recipe has no scores.
    """

    def requests(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        policy = Rival.parse(arm.policy).policy
        recorded = _recorded()
        recording, shares = recorded.recording, recorded.shares(seed)
        wanted = {
            Purpose.REPORT: shares > 7,
            Purpose.TUNING: shares == 7,
            Purpose.CAPACITY: shares >= 0,
        }
        chosen = np.flatnonzero(wanted[purpose])
        drawn = np.random.default_rng([seed, 3]).choice(chosen, len(arrivals_s)).tolist()
        recipe = _RECIPES.get(policy)
        scores = _scores(seed, recipe) if recipe else [None] * len(recording.lengths)

        def foreseen(answer: int) -> LengthDistribution | None:
            if policy in STOCK:
                return None
            if policy == ORACLE:
                return LengthDistribution.from_samples([recording.lengths[answer]], "truth")
            return recording.forecasts[answer]

        return [
            SimRequest(
                arrival_s=float(at),
                input_tokens=recorded.input_tokens[answer],
                output_tokens=min(int(recording.lengths[answer]), cap),
                max_new_tokens=cap,
                distribution=foreseen(answer),
                class_name=recorded.kinds[answer],
                scores=scores[answer],
            )
            for at, answer in zip(arrivals_s, drawn, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """input_tokens, kinds: of each answer of the recording."""

    recording: Recording
    input_tokens: Sequence[int]
    kinds: Sequence[str]

    def shares(self, seed: int) -> NDArray[np.int64]:
        """Of each answer 0 to 9, by its prompt; other ones for every seed."""
        return (self.salted(seed).prompts % np.uint64(10)).astype(np.int64)

    def salted(self, seed: int) -> Recording:
        """With prompts numbered anew, so that others are trained on."""
        numbers = [stable_hash(f"{seed} {prompt}") for prompt in self.recording.prompts.tolist()]
        return replace(self.recording, prompts=np.array(numbers, np.uint64))


@functools.cache
def _recorded() -> _Recorded:
    """Raises WorkloadError where nothing was recorded."""
    answers = read_answers()
    if not answers:
        raise WorkloadError("make answers first: python -m bench.real_model.answers --states")
    answers = complete(answers_folder(), answers)
    recording = Recording.read(answers_folder())
    places = [recording.layers.index(layer) for layer in _LAYERS]
    some = replace(recording, layers=_LAYERS, states=recording.states[:, places])
    return _Recorded(some, [a.input_tokens for a in answers], [a.kind for a in answers])


@functools.cache
def _scores(seed: int, recipe: str) -> list[Scores]:
    """Of all answers, by the probe of this seed."""
    recording = _recorded().salted(seed)
    probe = train(recording, RECIPES[recipe], seed=seed, say=lambda line: None).probe
    states = recording.states[:, _LAYERS.index(probe.layer)].astype(np.float32)
    log_p = from_steps(in_steps(probe.log_p(states)))
    order = np.lexsort((recording.ages, recording.answer))
    starts = np.searchsorted(recording.answer[order], np.arange(1, len(recording.lengths)))
    return [
        Scores(recording.ages[rows], log_p[rows], probe.reading) for rows in np.split(order, starts)
    ]
