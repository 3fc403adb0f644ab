"""What foretells an agent's answers where there is no text: `python -m bench.prediction.sessions`.

Recorded sessions of coding agents (bench.workloads.agents), begun at random times within a day and
taken in the order of time: each answer is predicted from its prompt's number of tokens and from
the answers that its session and all others had before, then revealed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.prediction.quality import Outcome, outcome, quality
from bench.workloads.agents import TRACE, Session, Step, held_out, read_sessions
from bench.workloads.prompts import WorkloadError
from predictor_store.predict import predictor
from predictor_store.predict.asked import NEW_SESSION, NUM_FEATURES, Asked
from predictor_store.predict.asked import Session as Answered
from predictor_store.predict.embedder import NUM_BESIDE
from predictor_store.predict.history import History
from sage_sched.distribution import LengthDistribution

CAPACITY = 10_000
_NUM_FIRST = 100
_SECONDS = 86_400.0
_NUM_BINS = 3
# Vectors of no meaning, each alike far from all others.
_DIMENSION = 64


class Asking(NamedTuple):
    """A step of a session, and which turn of it that is."""

    session: str
    turn: int
    step: Step


def in_order(sessions: Sequence[Session], seed: int) -> list[Asking]:
    rng = np.random.default_rng(seed)
    timed = [
        (start + step.start_s, Asking(session.name, turn, step))
        for session, start in zip(sessions, rng.uniform(0, _SECONDS, len(sessions)), strict=True)
        for turn, step in enumerate(session.steps)
    ]
    return [asking for _, asking in sorted(timed, key=lambda each: each[0])]


class Known:
    """What has been revealed."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._inputs: list[int] = []
        self._answered: dict[str, Answered] = {}
        self._histories = {
            with_session: History(_DIMENSION, NUM_BESIDE, CAPACITY) for with_session in (0, 1)
        }
        self._rng = np.random.default_rng(0)

    def reveal(self, asking: Asking) -> None:
        step = asking.step
        for with_session, history in self._histories.items():
            vector = self._vector(asking, bool(with_session))
            history.add(vector, step.output_tokens, False, "history")
            history.fit()
        self._lengths.append(step.output_tokens)
        self._inputs.append(step.input_tokens)
        had = self._answered.get(asking.session, NEW_SESSION)
        self._answered[asking.session] = had.after(step.input_tokens, step.output_tokens)

    def predictions(self, asking: Asking) -> Iterator[tuple[str, LengthDistribution]]:
        recent = self._lengths[-CAPACITY:]
        blind = LengthDistribution.from_samples(recent, "prior")
        yield "all lengths", blind
        inputs = np.array(self._inputs[-CAPACITY:])
        edges = np.quantile(inputs, np.arange(1, _NUM_BINS) / _NUM_BINS)
        alike = np.digitize(inputs, edges) == np.digitize(asking.step.input_tokens, edges)
        of_bin = np.array(recent)[alike]
        yield "three bins of input tokens", LengthDistribution.from_samples(of_bin, "history")
        had = self._answered.get(asking.session, NEW_SESSION)
        yield "all, and its session's last", predictor.within_session(blind, had.lengths)
        for with_session, history in self._histories.items():
            vector = self._vector(asking, bool(with_session))
            found = predictor.predict(history, vector) or blind
            if with_session:
                yield "ours", predictor.within_session(found, had.lengths)
            else:
                yield "ours, by token counts alone", found

    def _vector(self, asking: Asking, with_session: bool) -> NDArray[np.float32]:
        embedding = self._rng.normal(size=_DIMENSION).astype(np.float32)
        embedding /= np.linalg.norm(embedding)
        of = Asked(num_turns=1 + 2 * asking.turn, input_tokens=asking.step.input_tokens)
        had = self._answered.get(asking.session, NEW_SESSION) if with_session else NEW_SESSION
        words = np.zeros(NUM_BESIDE - NUM_FEATURES, np.float32)
        return np.concatenate([embedding, words, of.features(had)])


def replay(askings: Sequence[Asking]) -> dict[str, list[Outcome]]:
    """By predictor, but for the first _NUM_FIRST."""
    known, rng = Known(), np.random.default_rng(0)
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for index, asking in enumerate(tqdm(askings, unit="answer", mininterval=1)):
        if index >= _NUM_FIRST:
            for name, predicted in known.predictions(asking):
                length = asking.step.output_tokens
                outcomes[name].append(outcome(asking.session, predicted, length, rng))
        known.reveal(asking)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--limit", type=int, default=6_000, help="answers; default: %(default)s")
    parser.add_argument("--tuning", action="store_true", help="sessions not held out for reports")
    args = parser.parse_args()
    try:
        sessions = read_sessions(args.data / TRACE)
    except WorkloadError as error:
        print(f"sessions: {error}", file=sys.stderr)
        return 2
    chosen = [session for session in sessions if held_out(session) != args.tuning]
    outcomes = replay(in_order(chosen, 0)[: args.limit])
    print("| predictor | answers | CRPS gain | 95 % | in the central 80 % | Spearman |")
    print("|---|---|---|---|---|---|")
    for name, found in outcomes.items():
        of = quality(found, outcomes["all lengths"])
        print(
            f"| {name} | {len(found)} | {of.gain:.3f} | {of.gain_low:.2f} to {of.gain_high:.2f} "
            f"| {of.central_80:.2f} | {of.spearman:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
