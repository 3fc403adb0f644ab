"""Predict, then reveal, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tqdm import tqdm

from bench.predictor.answers import by_prompt
from bench.predictor.candidates import Candidate
from bench.predictor.quality import Outcome
from bench.workloads.foresight import embedded
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.history import History
from predictor_store.predict.regression import GeneralLength
from predictor_store.store.file import Record
from sage_sched.distribution import LengthDistribution

_CAPACITY = 10_000
# Below it a history says next to nothing, and who is best is luck.
NUM_FIRST = 100


def foretold(
    observations: Sequence[Observation],
    candidates: Mapping[str, Candidate],
    embedder: Embedder,
    *,
    general: GeneralLength | None = None,
    num_first: int = NUM_FIRST,
    name: str = "",
) -> Iterator[tuple[list[Observation], dict[str, LengthDistribution]]]:
    """The answers to each prompt, but for the first num_first, and what each candidate has said of
    them.

    Answers to one prompt that follow one another are predicted before any of them is revealed.
    general: what is known beside the history; it must not have been fitted to these answers.
    """
    history = History.of_encoder(embedder.encoder, _CAPACITY, general)
    groups = by_prompt(observations)
    vectors = embedded(embedder, [answers[0].prompt for answers in groups])
    num_revealed = 0
    for answers, vector in zip(tqdm(groups, desc=name, mininterval=1), vectors, strict=True):
        if num_revealed >= num_first:
            history.fit()
            said = {c: predict(history, vector) for c, predict in candidates.items()}
            # None: the history is empty, and nothing is known beside it.
            yield answers, {c: found for c, found in said.items() if found is not None}
        for answer in answers:
            history.add(Record(vector, answer.output_tokens, 0, answer.censored, "history"))
        num_revealed += len(answers)


def replay(
    observations: Sequence[Observation],
    candidates: Mapping[str, Candidate],
    embedder: Embedder,
    *,
    general: GeneralLength | None = None,
    name: str = "",
) -> dict[str, list[Outcome]]:
    """Each candidate's outcomes; see foretold. A cut answer is revealed and not judged, as nobody
    knows how long it was to be."""
    outcomes: dict[str, list[Outcome]] = {candidate: [] for candidate in candidates}
    for answers, said in foretold(observations, candidates, embedder, general=general, name=name):
        for candidate, found in said.items():
            outcomes[candidate] += [
                Outcome(
                    answer.prompt,
                    length := answer.output_tokens,
                    found.mean(),
                    found.crps(length),
                    found.has_within(length, 0.8),
                )
                for answer in answers
                if not answer.censored
            ]
    return outcomes
