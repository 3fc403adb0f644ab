"""The steps of a busy server with given step times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np

from sage_sched.step_learner import NUM_COMPILING
from sage_sched.steps import StepTime, attended_pairs

# The work of a step, see sage_sched.step_learner.COLUMNS, and its duration.
Step = tuple[list[float], float]

_POOL_TOKENS, _MAX_RUNNING = 72_000, 64
_PREFILL_TOKENS = 4096


def steps(step_time: StepTime, seed: int, *, rate: float, noise: float = 0.05) -> Iterator[Step]:
    """Yield steps for ever. Prompts have 10 to 4,000 tokens and answers 1 to 1,000. Arrivals follow
    no pattern. rate: requests/s, by the server's own clock. noise: of a step's length, as a share.
    One step in 200 takes up to 20 times as long."""
    rng = np.random.default_rng(seed)
    now_s, next_s = 0.0, 0.0
    waiting: deque[tuple[int, int]] = deque()
    running: list[list[int]] = []  # [tokens held, tokens to come]
    while True:
        while next_s <= now_s:
            lengths = np.clip(rng.lognormal((5.5, 4.5), 1.0), (10, 1), (4000, 1000)).astype(int)
            waiting.append((int(lengths[0]), int(lengths[1])))
            next_s += rng.exponential(1 / rate)
        held_tokens = sum(tokens for tokens, _ in running)
        entering: list[list[int]] = []
        while waiting and len(running) + len(entering) < _MAX_RUNNING:
            total = sum(tokens for tokens, _ in entering) + waiting[0][0]
            if held_tokens + total > _POOL_TOKENS or (entering and total > _PREFILL_TOKENS):
                break
            entering.append(list(waiting.popleft()))
        if entering:
            new = [tokens for tokens, _ in entering]
            pairs = sum(attended_pairs(0, tokens) for tokens in new)
            work = [1.0, len(new), sum(new), pairs, 0, 0, 0]
            seconds = step_time.prefill_s(len(new), sum(new), pairs)
            running += entering
        elif running:
            work = [0.0, 0, 0, 0, 1, len(running), held_tokens]
            seconds = step_time.decode_s(len(running), held_tokens)
            running = [[tokens + 1, left - 1] for tokens, left in running if left > 1]
        else:
            now_s = next_s
            continue
        seconds *= rng.lognormal(0.0, noise)
        if rng.random() < 1 / 200:
            seconds *= rng.uniform(1, 20)
        now_s += seconds
        yield work, seconds


def compiling_steps(
    step_time: StepTime, seed: int, *, prefills: float, noise: float, compile_s: float = 0.04
) -> Iterator[Step]:
    """Yield the steps of a server that has just started: its first prefills compile kernels.

    prefills: their share; three in ten of them are mixed steps. compile_s: how much longer each of
        the first takes.
    """
    rng = np.random.default_rng(seed)
    num_requests, num_prefills = 32, 0
    while True:
        num_requests = int(np.clip(num_requests + rng.integers(-3, 4), 1, 128))
        decodes = (num_requests, num_requests * rng.integers(300, 1200))
        work = [0.0, 0, 0, 0, 1, *decodes]
        num_prefills += (is_prefill := rng.random() < prefills)
        if is_prefill:
            new = np.clip(rng.lognormal(5.5, 1.0, rng.integers(1, 5)), 10, 4000)
            pairs = float((new**2 / 2).sum())
            beside = decodes if rng.random() < 0.3 else (0, 0)
            work = [1.0, len(new), float(new.sum()), pairs, 0, *beside]
        seconds = float(np.dot(work, astuple(step_time))) * rng.lognormal(0.0, noise)
        yield work, seconds + compile_s * (is_prefill and num_prefills <= NUM_COMPILING)
