"""Makes sessions of coding agents, in which each step waits for the answer to the step before.

A recorded session has no text. For each step it gives the start, the lengths of prompt and answer,
and the length of the prefix that the prompt shares with the prompt of an earlier step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.simulator.presets import Engine
from bench.simulator.radix_tree import Span, cut
from bench.simulator.request import SimRequest
from bench.workloads.prompts import WorkloadError, stable_hash
from bench.workloads.source import Draw, Purpose, Source
from sage_sched.distribution import LengthDistribution
from sage_sched.job import LEAST_SLO_MS, Hints
from sage_sched.steps import attended_pairs

TRACE = "trace_agentic_coding.jsonl.gz"
# The standard deviation of the logarithm of a client's error when it predicts its next pause. Two
# thirds of its predictions are right within a factor of two.
_PAUSE_ERROR = 0.7
# Answers are predicted by this number of quantiles of other sessions' lengths.
_NUM_QUANTILES = 64


class Step(NamedTuple):
    """One request of a session.

    start_s: seconds after the start of the session's first step.
    parent: the earlier step with which its prompt shares a prefix of shared_tokens; None if there
        is none.
    """

    start_s: float
    input_tokens: int
    output_tokens: int
    parent: int | None
    shared_tokens: int


class Session(NamedTuple):
    name: str
    steps: tuple[Step, ...]


def read_sessions(path: Path) -> list[Session]:
    """Return the recorded sessions. Raises WorkloadError if the file is absent or has other
    content."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [_session(json.loads(line)) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path} holds no sessions: {error!r}") from error


def _session(row: dict[str, Any]) -> Session:
    steps = (
        Step(start_s, input_tokens, max(1, output_tokens), None if parent < 0 else parent, shared)
        for start_s, input_tokens, output_tokens, parent, shared in row["requests"]
    )
    return Session(str(row["session"]), tuple(steps))


def factor_for(sessions: Sequence[Session], engine: Engine) -> float:
    """Return the divisor of all token counts that makes the longest prompt half the pool."""
    longest = max(step.input_tokens for session in sessions for step in session.steps)
    return longest / (engine.kv_pool_tokens / 2)


def held_out(session: Session) -> bool:
    """Whether a session is for reports. The others are for tuning and for predictions."""
    return stable_hash("purpose of " + session.name) % 2 == 0


def known_lengths(sessions: Sequence[Session], factor: float) -> LengthDistribution:
    """Return the one prediction for every answer: quantiles of the known lengths."""
    lengths = [step.output_tokens / factor for session in sessions for step in session.steps]
    shares = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    quantiles = np.maximum(1, np.rint(np.quantile(lengths, shares))).astype(int)
    return LengthDistribution.from_samples(quantiles, "warm")


def requests_of(
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    *,
    factor: float,
    engine: Engine,
    prediction: LengthDistribution | None,
    max_pause_s: float,
    max_steps: int | None = None,
    cap_tokens: int = 4096,
) -> list[SimRequest]:
    """Return the steps of sessions, session by session.

    A step comes after the answer to the previous step and a pause. The pause is the time between
    the recorded starts of the two, minus the time that the previous step takes alone on the engine;
    at most max_pause_s. Only the first max_steps of each session count.

    starts_s: when each session begins, increasing.
    """
    requests: list[SimRequest] = []
    for number, (session, start_s) in enumerate(zip(sessions, starts_s, strict=True)):
        first = len(requests)
        spans: list[tuple[Span, ...]] = []
        for step, (lengths, pause_s) in zip(
            session.steps[:max_steps], _scaled(session, factor, engine), strict=False
        ):
            index = len(requests)
            input_tokens, output_tokens, shared_tokens = lengths
            begins = () if step.parent is None else cut(spans[step.parent], shared_tokens)
            known = sum(end - begin for _, begin, end in begins)
            spans.append((*begins, (index, 0, input_tokens - known)))
            requests.append(
                SimRequest(
                    arrival_s=float(start_s),
                    input_tokens=input_tokens,
                    output_tokens=min(output_tokens, cap_tokens),
                    max_new_tokens=cap_tokens,
                    distribution=prediction,
                    class_name="first step" if index == first else "later step",
                    spans=spans[-1],
                    follows=None if index == first else index - 1,
                    pause_s=min(pause_s, max_pause_s),
                    hints=Hints(session=f"{number} {session.name}"),
                )
            )
    return requests


def with_said_pauses(requests: Sequence[SimRequest], rng: np.random.Generator) -> list[SimRequest]:
    """Return the same requests with clients' hints: about when the next step comes, and which is
    the last."""
    errors = rng.lognormal(0.0, _PAUSE_ERROR, len(requests))
    hinted = []
    for request, after, error in zip(requests, (*requests[1:], None), errors, strict=True):
        if after is None or after.follows is None:
            hints = replace(request.hints, ends_session=True)
        else:
            pause_ms = max(LEAST_SLO_MS, after.pause_s * 1000 * float(error))
            hints = replace(request.hints, pause_ms=pause_ms)
        hinted.append(replace(request, hints=hints))
    return hinted


def _scaled(
    session: Session, factor: float, engine: Engine
) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Yield, for each step, its (input, output, shared) tokens and the pause before it."""
    last_start_s = service_s = 0.0
    for step in session.steps:
        input_tokens = max(2, round(step.input_tokens / factor))
        shared_tokens = min(int(step.shared_tokens / factor), input_tokens - 1)
        output_tokens = max(1, round(step.output_tokens / factor))
        pause_s = max(0.0, step.start_s - last_start_s - service_s)
        yield (input_tokens, output_tokens, shared_tokens), pause_s
        last_start_s = step.start_s
        service_s = _alone_s(engine, input_tokens, output_tokens, shared_tokens)


class Agents(Source):
    """Sessions of one half of the recording, predicted by the lengths of the other half.

    engine: its pool sets the divisor of token counts.
    """

    num_for_capacity = 300

    def __init__(
        self, data: Path, engine: Engine, *, max_pause_s: float = 300.0, max_steps: int = 60
    ) -> None:
        sessions = read_sessions(data / TRACE)
        self._engine = engine
        self._factor = factor_for(sessions, self._engine)
        self._halves = {
            half: [session for session in sessions if held_out(session) == half]
            for half in (True, False)
        }
        self._max_pause_s, self._max_steps = max_pause_s, max_steps

    def requests(self, draw: Draw) -> list[SimRequest]:
        asked = self._halves[draw.purpose != Purpose.TUNING]
        rng = np.random.default_rng(draw.seed)
        rounds = range(0, draw.number, len(asked))
        chosen = np.concatenate([rng.permutation(len(asked)) for _ in rounds])[: draw.number]
        requests = requests_of(
            [asked[i] for i in chosen],
            draw.arrivals_s.tolist(),
            factor=self._factor,
            engine=self._engine,
            prediction=self.all_answers(),
            max_pause_s=self._max_pause_s,
            max_steps=self._max_steps,
            cap_tokens=draw.cap,
        )
        return with_said_pauses(requests, rng) if draw.arm.said_by == "client" else requests

    def all_answers(self) -> LengthDistribution:
        return known_lengths(self._halves[False], self._factor)


def _alone_s(engine: Engine, input_tokens: int, output_tokens: int, cached_tokens: int) -> float:
    """Return the seconds on an idle engine that has the prefix of the prompt."""
    step_time, new_tokens = engine.step_time, input_tokens - cached_tokens
    prefill_s = step_time.prefill_s(1, new_tokens, attended_pairs(cached_tokens, new_tokens))
    return prefill_s + output_tokens * step_time.decode_s(1, input_tokens)
