"""Measures for how long moves of KV, to host memory and back, hold up the device."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch

from patches.engine_types import Scheduler
from patches.scheduler.calibration import Calibration
from patches.scheduler.copies import Copies

# At start-up this many tokens are moved to host memory and back; the fastest round is used.
_TRIAL_TOKENS, _TRIAL_ROUNDS = 1024, 3
# Ranks agree again after this many moves, on the median of the latest _MOST_MOVES.
_MOVES_PER_ROUND, _MOST_MOVES = 16, 64


class SwapMeter:
    """Measures for how many seconds a token's move, one way, holds up the device. The part of a
    move that overlaps with compute does not count. Rank 0 measures; all ranks use its figure from
    the same move on.

    As for all costs, the unit is a second of the configured step times: if steps take half as long
    as configured, the time of a move counts twice.

    The figure is a median, weighted by tokens, so a stall during some moves does not count. After a
    longer stall, moves seem so expensive that the server makes none, so none corrects the figure.
    Therefore the figure of the start-up trial returns once the server has worked for a while
    without a move (rest()).

    total_s, total_tokens: all moves so far, on this rank.
    rests_at_tokens: rest() is due once the server has served more than this.
    """

    def __init__(self, scheduler: Scheduler, calibration: Calibration, copies: Copies) -> None:
        self._scheduler = scheduler
        self._calibration = calibration
        self._num_moves = 0
        # Seconds per token, and tokens, of each move.
        self._moves: deque[tuple[float, int]] = deque(maxlen=_MOST_MOVES)
        self.rests_at_tokens = math.inf
        self._timed = deque[tuple[Span, int]]()  # moves that the device may not have made yet
        self.total_s = 0.0
        self.total_tokens = 0
        self.token_s = self._trial_s = self._agreed(_trial_token_s(scheduler, copies))

    @contextmanager
    def timing(self) -> Iterator[SimpleNamespace]:
        """Time moves of KV within this context, either way, on all ranks: how long they hold up the
        present stream. The caller sets num_tokens of the result to the number of tokens that it
        moved."""
        self._calibration.steps.interrupted()
        move, span = SimpleNamespace(num_tokens=0), Span(self._scheduler.device)
        yield move
        span.end()
        if move.num_tokens:
            self._timed.append((span, move.num_tokens))
            self.total_tokens += move.num_tokens
            self._num_moves += 1
            self.rests_at_tokens = -1
            while self._timed and (seconds := self._timed[0][0].seconds()) is not None:
                num_tokens = self._timed.popleft()[1]
                self._moves.append((seconds / num_tokens, num_tokens))
                self.total_s += seconds
            if self._num_moves % _MOVES_PER_ROUND == 0:
                self._refine()

    def rest(self, served_tokens: int, most_tokens: int) -> None:
        """Return to the start-up trial's figure as soon as the server has served most_tokens
        without a move. All ranks call this before the same pass, if it is due."""
        if self.rests_at_tokens < 0:
            self.rests_at_tokens = served_tokens + most_tokens
            return
        self.token_s, self.rests_at_tokens = self._trial_s, math.inf
        self._moves.clear()

    def _refine(self) -> None:
        if not self._moves:  # the device has not measured it yet
            self.token_s = self._agreed(self.token_s)
            return
        prices_s, num_tokens = zip(*sorted(self._moves), strict=True)
        up_to_tokens = list(accumulate(num_tokens))
        token_s = prices_s[bisect_left(up_to_tokens, up_to_tokens[-1] / 2)]
        self.token_s = self._agreed(token_s * self._calibration.pace())

    def _agreed(self, token_s: float) -> float:
        return float(self._scheduler.attn_tp_group.broadcast_object(token_s))


class Span:
    """The time that the present stream takes for some work, by the device's clock if it has
    one."""

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._has_events = device != "cpu" and hasattr(self._module, "Event")
        self._start, self._end = self._now(), None  # type: Any, Any

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        self._end = self._now()

    def seconds(self) -> float | None:
        """Return the seconds, or None if the work is not done yet."""
        if not self._has_events:
            return float(self._end - self._start)
        return self._start.elapsed_time(self._end) / 1e3 if self._end.query() else None


def _trial_token_s(scheduler: Scheduler, copies: Copies) -> float:
    """Return the seconds per token of a trial. It moves slots that are not in use yet, and restores
    their content."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    device = torch.get_device_module(scheduler.device)
    num_tokens: int = min(_TRIAL_TOKENS, pool.size, copies.num_tokens // 2)
    slots = torch.arange(1, num_tokens + 1, device=pool.device)  # 0 is SGLang's padding
    times_s: list[float] = []
    for _ in range(_TRIAL_ROUNDS if num_tokens else 0):
        device.synchronize()
        spans = [Span(scheduler.device)]
        copy = copies.copied(slots)
        spans[0].end()
        copies.fetched(copy)
        device.synchronize()
        spans.append(Span(scheduler.device))
        copies.written(copy, slots)
        spans[1].end()
        device.synchronize()
        times_s.append(sum(span.seconds() or 0.0 for span in spans))
    return min(times_s, default=0.0) / max(1, 2 * num_tokens)
