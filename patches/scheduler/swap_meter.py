"""Measures the seconds to move KV between the device and host memory."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace

import torch

from patches.engine_types import Scheduler
from patches.scheduler.calibration import Calibration

# At start-up this many tokens are moved to host memory and back; the fastest round is used.
_TRIAL_TOKENS, _TRIAL_ROUNDS = 1024, 3
# Ranks agree anew after this many moves, on the median of the latest _MOST_MOVES.
_MOVES_PER_ROUND, _MOST_MOVES = 16, 64


class SwapMeter:
    """Measures the seconds to move a token one way. Rank 0 measures; all ranks use its figure from
    the same move on.

    As for all costs, the unit is a second of the configured step times: if steps take half as long
    as configured, the time of a move counts twice.

    The figure is a median, weighted by tokens, so a stall during some moves does not count. After a
    longer stall, moves seem so expensive that the server makes none, so none corrects the figure.
    Therefore the figure of the start-up trial returns once the server has worked for a while
    without a move (rest()).

    total_s, total_tokens: all moves so far, on this rank.
    """

    def __init__(self, scheduler: Scheduler, calibration: Calibration) -> None:
        self._scheduler = scheduler
        self._calibration = calibration
        self._num_moves = 0
        # Seconds per token, and tokens, of each move.
        self._moves: deque[tuple[float, int]] = deque(maxlen=_MOST_MOVES)
        # The number of moves at the last call of rest(), and the served tokens when it last grew.
        self._rested = (0, 0)
        self.total_s = 0.0
        self.total_tokens = 0
        self.token_s = self._trial_s = self._agreed(_trial_token_s(scheduler))

    @contextmanager
    def timing(self) -> Iterator[SimpleNamespace]:
        """Time moves of KV within this context, either way, on all ranks. The caller sets
        num_tokens of the result to the number of tokens that it moved."""
        _wait_for_device(self._scheduler)  # a pass in flight is no part of the move
        self._calibration.steps.interrupted()
        move = SimpleNamespace(num_tokens=0)
        started = time.perf_counter()
        yield move
        if move.num_tokens:
            seconds = time.perf_counter() - started
            self._moves.append((seconds / move.num_tokens, move.num_tokens))
            self.total_s += seconds
            self.total_tokens += move.num_tokens
            self._num_moves += 1
            if self._num_moves % _MOVES_PER_ROUND == 0:
                self._refine()

    def rest(self, served_tokens: int, most_tokens: int) -> None:
        """Return to the start-up trial's figure if the server has served most_tokens without a
        move. All ranks call this before a pass."""
        num_moves, since_tokens = self._rested
        if num_moves != self._num_moves:
            self._rested = self._num_moves, served_tokens
        elif served_tokens - since_tokens > most_tokens:
            self.token_s = self._trial_s
            self._moves.clear()

    def _refine(self) -> None:
        prices_s, num_tokens = zip(*sorted(self._moves), strict=True)
        up_to_tokens = list(accumulate(num_tokens))
        token_s = prices_s[bisect_left(up_to_tokens, up_to_tokens[-1] / 2)]
        self.token_s = self._agreed(token_s * self._calibration.pace())

    def _agreed(self, token_s: float) -> float:
        return float(self._scheduler.attn_tp_group.broadcast_object(token_s))


def _trial_token_s(scheduler: Scheduler) -> float:
    """Return the seconds per token of a trial. It moves slots that are not in use yet, and restores
    their content."""
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
