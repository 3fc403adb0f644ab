"""Steps as a busy server of given step times takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

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
