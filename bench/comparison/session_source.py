"""Where the requests of `sage-sched bench agents` come from."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.workloads.agents import (
    TRACE,
    factor_for,
    held_out,
    known_lengths,
    read_sessions,
    requests_of,
    spread_of,
)
from bench.workloads.mooncake import read_mooncake, requests_of_trace
from bench.workloads.prompts import WorkloadError
from sage_sched.distribution import LengthDistribution


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from: those of a rate and a seed, by what divides their token counts, and
    what is foreseen of all answers. rate_unit: what the rate is in."""

    factor: float
    foreseen: LengthDistribution
    requests: Callable[[float, int], list[SimRequest]]
    rate_unit: str
    num_seeds: int


def source_of(args: argparse.Namespace, engine: Engine) -> Source:
    """What the command's arguments ask for. Raises WorkloadError if there is nothing."""
    return _recorded_sessions(args, engine) if args.data else _mooncake(args, engine)


def _recorded_sessions(args: argparse.Namespace, engine: Engine) -> Source:
    """Recorded sessions of one half, foreseen by the lengths of the other."""
    sessions = read_sessions(args.data / TRACE)
    asked = [session for session in sessions if held_out(session) == args.held_out]
    others = [session for session in sessions if held_out(session) != args.held_out]
    factor = factor_for(sessions, engine)
    foreseen = known_lengths(others, factor)

    def requests(rate: float, seed: int) -> list[SimRequest]:
        generator = np.random.default_rng(seed)
        chosen = generator.permutation(len(asked))[: args.num_sessions]
        return requests_of(
            [asked[i] for i in chosen],
            np.cumsum(generator.exponential(1 / rate, len(chosen))).tolist(),
            factor=factor,
            engine=engine,
            foreseen=foreseen,
            max_pause_s=args.max_pause_s,
            max_steps=args.max_steps,
            cap_tokens=_cap_tokens(args),
        )

    return Source(factor, foreseen, requests, "sessions/s", args.seeds)


def _mooncake(args: argparse.Namespace, engine: Engine) -> Source:
    """A trace, but for its first tenth: by the answers to that the others are foreseen."""
    trace = read_mooncake(args.mooncake)
    num_first = max(1, len(trace) // 10)
    if len(trace) <= num_first:
        raise WorkloadError(f"{args.mooncake} holds {len(trace)} requests, allowed: 2 or more")
    longest = max(each.input_tokens for each in trace)
    factor = max(args.shrink, longest / (engine.kv_pool_tokens / 2))
    foreseen = spread_of([each.output_tokens / factor for each in trace[:num_first]])

    def requests(rate: float, seed: int) -> list[SimRequest]:
        return requests_of_trace(
            trace[num_first:],
            factor=factor,
            speed=rate,
            foreseen=foreseen,
            cap_tokens=_cap_tokens(args),
        )

    return Source(factor, foreseen, requests, "times as fast as recorded", num_seeds=1)


def _cap_tokens(args: argparse.Namespace) -> int:
    return max(64, int(4096 / args.shrink))
