"""Seconds to move KV between the device and host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from patches.engine_types import Scheduler
from patches.scheduler.calibration import Calibration

# At start-up this many tokens are moved there and back; the fastest round counts.
_TRIAL_TOKENS, _TRIAL_ROUNDS = 1024, 3
# Ranks agree anew after this many moves.
_MOVES_PER_ROUND = 16


class SwapMeter:
    """Seconds to move a token one way. Rank 0 measures; all ranks use its figure from the same move
    on. They are seconds of the step times, as all costs are: if the server's steps take half as
    long as configured, a move counts twice. total_s, total_tokens: all moves so far, on this rank.
    """

    def __init__(self, scheduler: Scheduler, calibration: Calibration) -> None:
        self._scheduler = scheduler
        self._calibration = calibration
        self._num_moves = 0
        self._num_tokens = 0
        self._seconds = 0.0
        self.total_s = 0.0
        self.total_tokens = 0
        self.token_s = self._agreed(_trial_token_s(scheduler))

    @contextmanager
    def timing(self) -> Iterator[SimpleNamespace]:
        """Around moves of KV, either way, on all ranks. The caller sets num_tokens of what it gets
        to the number of tokens that it moved."""
        _wait_for_device(self._scheduler)  # a pass in flight is no part of the move
        self._calibration.steps.interrupted()
        move = SimpleNamespace(num_tokens=0)
        started = time.perf_counter()
        yield move
        if move.num_tokens:
            seconds = time.perf_counter() - started
            self._seconds += seconds
            self.total_s += seconds
            self.total_tokens += move.num_tokens
            self._num_tokens += move.num_tokens
            self._num_moves += 1
            if self._num_moves % _MOVES_PER_ROUND == 0:
                self._refine()

    def _refine(self) -> None:
        seconds = self._seconds * self._calibration.pace()
        self.token_s = self._agreed(seconds / self._num_tokens)
        # Half of it counts on, so that the figure follows the server without jumping.
        self._seconds /= 2
        self._num_tokens = max(1, self._num_tokens // 2)

    def _agreed(self, token_s: float) -> float:
        return float(self._scheduler.attn_tp_group.broadcast_object(token_s))


def _trial_token_s(scheduler: Scheduler) -> float:
    """Moves slots that nobody uses yet, and writes back what was in them."""
    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    num_tokens: int = min(_TRIAL_TOKENS, pool.size)
    slots = torch.arange(1, num_tokens + 1, device=pool.device)  # 0 is SGLang's padding
    times_s: list[float] = []
    for _ in range(_TRIAL_ROUNDS):
        _wait_for_device(scheduler)
        started = time.perf_counter()
        allocator.load_cpu_copy(allocator.get_cpu_copy(slots), slots)  # returns when it is done
        times_s.append(time.perf_counter() - started)
    return min(times_s) / (2 * num_tokens)


def _wait_for_device(scheduler: Scheduler) -> None:
    torch.get_device_module(scheduler.device).synchronize()
