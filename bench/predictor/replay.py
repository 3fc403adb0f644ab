"""Predict, then reveal, in the order of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqdm import tqdm

from bench.predictor.answers import by_prompt
from bench.predictor.candidates import Candidate
from bench.predictor.quality import Outcome
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.history import History
from predictor_store.predict.regression import GeneralLength

_CAPACITY = 10_000
# Below it a history says next to nothing, and who is best is luck.
NUM_FIRST = 100
_CHUNK = 256


def replay(
    observations: Sequence[Observation],
    candidates: Mapping[str, Candidate],
    embedder: Embedder,
    *,
    general: GeneralLength | None = None,
    num_first: int = NUM_FIRST,
    name: str = "",
) -> dict[str, list[Outcome]]:
    """Each candidate's outcomes, but for the first num_first observations.

    Answers to one prompt that follow one another are predicted before any of them is revealed. A
    cut answer is revealed and not judged, as nobody knows how long it was to be. general: what is
    known beside the history; it must not have been fitted to these answers.
    """
    history = History.of_encoder(embedder.encoder, _CAPACITY, general)
    outcomes: dict[str, list[Outcome]] = {candidate: [] for candidate in candidates}
    num_revealed = 0
    with tqdm(total=len(observations), desc=name, unit="answer", mininterval=1) as progress:
        groups = by_prompt(observations)
        for start in range(0, len(groups), _CHUNK):
            chunk = groups[start : start + _CHUNK]
            vectors = embedder.embed([answers[0].prompt for answers in chunk])
            for answers, vector in zip(chunk, vectors, strict=True):
                if num_revealed >= num_first:
                    history.fit()
                    for candidate, predict in candidates.items():
                        said = predict(history, vector)
                        assert said is not None  # the history is not empty
                        outcomes[candidate] += [
                            Outcome(
                                answer.prompt,
                                length := answer.output_tokens,
                                said.mean(),
                                said.crps(length),
                                said.has_within(length, 0.8),
                            )
                            for answer in answers
                            if not answer.censored
                        ]
                for answer in answers:
                    history.add(vector, answer.output_tokens, answer.censored, "history")
                num_revealed += len(answers)
                progress.update(len(answers))
    return outcomes
