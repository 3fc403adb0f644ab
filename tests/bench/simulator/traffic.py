"""Engines and requests for the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.state import Options
from sage_sched.app.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.steps import StepTime
from tests.bench.simulator.invariants import watch

CONFIG = SageConfig()
CHECKED = Options(watch=watch)
STAY = Options(preempt=False, watch=watch)

STEP_TIME = StepTime(
    prefill_base_s=0.004,
    prefill_request_s=0.001,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-8,
    decode_base_s=0.02,
    decode_request_s=1e-4,
    decode_kv_token_s=1e-7,
)
# Small enough that pool, slots and chunks all bind.
SMALL = Engine(
    step_time=STEP_TIME,
    kv_pool_tokens=2560,
    max_running_requests=10,
    page_size=16,
    chunked_prefill_size=512,
    max_prefill_tokens=1024,
    swap_token_s=1e-5,
)


def request(
    arrival_s: float, input_tokens: int, output_tokens: int, cap: int = 400, **more: Any
) -> SimRequest:
    """Return a request, without a prediction by default."""
    plain = SimRequest(arrival_s, input_tokens, output_tokens, cap, None, "hand-made")
    return replace(plain, **more)


def known(*lengths: int) -> LengthDistribution:
    return LengthDistribution.from_samples(lengths, "history")


def mixed(num_requests: int, rate: float, seed: int, *, unknown: float = 0.0) -> list[SimRequest]:
    """Short and long prompts and answers, Poisson arrivals; a share of them without prediction."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    requests = []
    for arrival_s in arrivals_s:
        mean = float(rng.choice([20, 80, 250]))
        lengths = np.clip(mean * rng.lognormal(-0.18, 0.6, 20), 1, 400).astype(int)
        asked = request(
            float(arrival_s),
            int(np.clip(rng.lognormal(4.5, 1.2), 4, 1500)),
            int(np.clip(mean * rng.lognormal(-0.18, 0.6), 1, 400)),
            distribution=None if rng.random() < unknown else known(*lengths),
            class_name=f"{mean:.0f}",
        )
        requests.append(asked)
    return requests


# With burst() the pool is full before any of its requests ends: some are retracted.
MANY_SLOTS = replace(SMALL, kv_pool_tokens=4096, max_running_requests=64)


def burst() -> list[SimRequest]:
    """Twenty seconds of light traffic, which make admission bold, and then 60 requests at once."""
    arrivals_s = [0.5 * i for i in range(40)] + [20.0] * 60
    return [request(at_s, 16, 100, 100, distribution=known(80, 100)) for at_s in arrivals_s]
