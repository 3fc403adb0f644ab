"""Replays answered prompts in the order of time: predicts each, then reveals its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqdm import tqdm

from bench.predictor.answers import by_prompt
from bench.predictor.candidates import Candidate
from bench.predictor.quality import Outcome
from bench.workloads.predictors import embedded
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.history import History
from predictor_store.predict.regression import GeneralLength
from predictor_store.store.file import Record
from sage_sched.distribution import LengthDistribution

_CAPACITY = 10_000
# The first answers are not judged: with so short a history, luck decides.
NUM_FIRST = 100


def replay(
    observations: Sequence[Observation],
    candidates: Mapping[str, Candidate],
    embedder: Embedder,
    *,
    general: GeneralLength | None = None,
    name: str = "",
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each candidate, without the first NUM_FIRST answers.

    Successive answers to the same prompt are predicted before any of them is revealed. A
    cut answer is revealed but not judged, because its length is unknown.

    general: a model of lengths. It must not have been fitted to these answers.
    """
    outcomes: dict[str, list[Outcome]] = {candidate: [] for candidate in candidates}
    history = History.of_encoder(embedder.encoder, _CAPACITY, general)
    groups = by_prompt(observations)
    vectors = embedded(embedder, [answers[0].prompt for answers in groups])
    num_revealed = 0
    for answers, vector in zip(tqdm(groups, desc=name, mininterval=1), vectors, strict=True):
        if num_revealed >= NUM_FIRST:
            history.fit()
            for candidate, predict in candidates.items():
                if (found := predict(history, vector)) is not None:
                    judged = (answer for answer in answers if not answer.censored)
                    outcomes[candidate] += [_outcome(answer, found) for answer in judged]
        for answer in answers:
            history.add(Record(vector, answer.output_tokens, 0, answer.censored, "history"))
        num_revealed += len(answers)
    return outcomes


def _outcome(answer: Observation, found: LengthDistribution) -> Outcome:
    length = answer.output_tokens
    within = found.has_within(length, 0.8)
    return Outcome(answer.prompt, length, found.mean(), found.crps(length), within)
