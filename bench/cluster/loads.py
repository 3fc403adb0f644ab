"""What is sent to a cluster: real prompts, heavy tails, agents' sessions, and deadlines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.engines.baseline import Saturation
from bench.engines.simulator.presets import H800_QWEN3_32B, Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.slo.lengths import RECORDINGS, read_lengths
from bench.slo.runs import Setting
from bench.workloads.agents import TRACE, factor_for, held_out, known_lengths, read_sessions
from bench.workloads.agents import requests_of as steps_of
from bench.workloads.arrivals import poisson_arrivals
from bench.workloads.foresight import (
    Foresight,
    Predict,
    heavy_tailed,
    token_counter,
    with_heavy_tail,
)
from bench.workloads.prompts import WorkloadRequest, sample, stable_hash
from bench.workloads.source import load_workload
from sage_sched.config import PredictorConfig, SageConfig

PROMPTS = ("mixed", "heavy-tailed")
SESSIONS = ("agents",)
LOADS = (*PROMPTS, *SESSIONS, *RECORDINGS)
_MAX_NEW_TOKENS = 4096
# So many at once, and first come, first served: with fewer, long answers end when no queue is left.
_BURST = 3000
# Of sessions an engine takes so many a second before their steps wait long (sage-sched bench
# agents); of each the first steps count.
_SESSIONS_PER_S, _MOST_STEPS = 0.008, 20


@dataclass(frozen=True, slots=True)
class Load:
    """policy: of each engine. capacity: what one engine sustains, in `unit` a second. requests: so
    many of that unit at a rate, by a seed. has_slo: whether they have deadlines."""

    engine: Engine
    policy: str
    capacity: float
    unit: str
    requests: Callable[[float, int, int], list[SimRequest]]
    has_slo: bool = False


def load_named(name: str, data: Path, *, tuning: bool) -> Load:
    """One of LOADS. tuning: of that half that is not reported. Raises WorkloadError."""
    if name in RECORDINGS:
        setting = Setting(read_lengths(data, name, held_out=not tuning))
        draw = setting.requests
        return Load(setting.engine, "proserve", setting.capacity(), "requests", draw, True)
    return _sessions(data, tuning) if name in SESSIONS else _prompts(name, data, tuning)


@functools.cache
def _foresight(data: Path, tuning: bool) -> tuple[Foresight, list[WorkloadRequest]]:
    """What predicts, and the prompts that are asked."""
    workload = load_workload(data)
    foresight = Foresight(workload, PredictorConfig(), token_counter())
    half = [r for r in workload.evaluation if stable_hash("half " + r.prompt) % 2 == tuning]
    asked = sample(half, 3000, seed=0, at_most=True)
    foresight.read(asked)
    return foresight, asked


def _prompts(name: str, data: Path, tuning: bool) -> Load:
    foresight, asked = _foresight(data, tuning)
    predict: Predict = functools.cache(foresight.semantic())
    if name == "heavy-tailed":
        predict = functools.cache(with_heavy_tail(predict))

    def requests(rate: float, num_requests: int, seed: int) -> list[SimRequest]:
        drawn = np.random.default_rng([seed, 8]).integers(len(asked), size=num_requests)
        chosen = [asked[i] for i in drawn]
        plain = chosen
        if name == "heavy-tailed":
            chosen = heavy_tailed(chosen, seed)
        return [
            SimRequest(
                arrival_s=float(arrival_s),
                input_tokens=foresight.input_tokens(request),
                output_tokens=min(request.output_tokens, _MAX_NEW_TOKENS),
                max_new_tokens=_MAX_NEW_TOKENS,
                distribution=predict(known),
                class_name=request.class_name,
            )
            for arrival_s, request, known in zip(
                poisson_arrivals(num_requests, seed) / rate, chosen, plain, strict=True
            )
        ]

    engine = H800_QWEN3_32B
    burst = [replace(each, arrival_s=0.0) for each in requests(1.0, _BURST, 1_000_003)]
    served = simulate(engine, "fcfs-fill", SageConfig(), burst)
    capacity = Saturation.measured(served.ttft_s, served.ttlt_s).capacity
    return Load(engine, "sage", capacity, "requests", requests)


def _sessions(data: Path, tuning: bool) -> Load:
    sessions, engine = read_sessions(data / TRACE), H800_QWEN3_32B
    asked = [session for session in sessions if held_out(session) != tuning]
    others = [session for session in sessions if held_out(session) == tuning]
    factor = factor_for(sessions, engine)
    foreseen = known_lengths(others, factor)

    def requests(rate: float, num_sessions: int, seed: int) -> list[SimRequest]:
        generator = np.random.default_rng(seed)
        chosen = generator.integers(len(asked), size=num_sessions)
        return steps_of(
            [asked[i] for i in chosen],
            np.cumsum(generator.exponential(1 / rate, num_sessions)).tolist(),
            factor=factor,
            engine=engine,
            foreseen=foreseen,
            max_pause_s=300.0,
            max_steps=_MOST_STEPS,
        )

    return Load(engine, "sage", _SESSIONS_PER_S, "sessions", requests)
