"""What a scheduler's steps had to do, and how long they took."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import astuple

from patches.engine_types import Batch
from sage_sched.step_time import StepTime

# Consecutive steps are added up: under overlap a launch waits for the step before, so that the
# time of one step shows up in its neighbour's.
STEPS_PER_WINDOW = 8
_MAX_WINDOWS = 256

# The columns of a window, sums over its steps; the coefficients of StepTime, in their order, are
# what one of each takes.
COLUMNS = (
    "prefill_steps", "prefill_requests", "prefill_tokens", "prefill_pairs",
    "decode_steps", "decode_requests", "decode_kv_tokens", "seconds",
)  # fmt: skip


class StepMeter:
    """Keeps the latest windows. For measurements on rank 0: no decision may rest on a clock."""

    def __init__(self) -> None:
        self._windows: deque[list[float]] = deque(maxlen=_MAX_WINDOWS)
        self._sums = [0.0] * len(COLUMNS)
        self._num_steps = 0
        self._last: tuple[list[float], float] | None = None

    def launched(self, batch: Batch, after_idle: bool) -> None:
        """A batch (sglang/srt/managers/schedule_batch.py, ScheduleBatch) is about to run."""
        now = time.perf_counter()
        if self._last is not None and not after_idle:
            work, started = self._last
            self._add([*work, now - started])
        elif after_idle:
            self._sums, self._num_steps = [0.0] * len(COLUMNS), 0
        self._last = (_work(batch), now)

    def _add(self, row: list[float]) -> None:
        self._sums = [total + value for total, value in zip(self._sums, row, strict=True)]
        self._num_steps += 1
        if self._num_steps == STEPS_PER_WINDOW:
            self._windows.append(self._sums)
            self._sums, self._num_steps = [0.0] * len(COLUMNS), 0

    def pace(self, step_time: StepTime) -> float:
        """The seconds that the model gives the steps of all windows, to those that they took; 1
        before there are any."""
        if not self._windows:
            return 1.0
        *work, seconds = (sum(column) for column in zip(*self._windows, strict=True))
        model_s = sum(w * c for w, c in zip(work, astuple(step_time), strict=True))
        return float(model_s / seconds)

    def windows(self) -> list[list[float]]:
        """Oldest first, each with COLUMNS."""
        return list(self._windows)


def _work(batch: Batch) -> list[float]:
    """COLUMNS of one step, less the last."""
    if batch.forward_mode.is_extend_without_speculative():
        pairs = sum(
            new * (cached + new / 2)
            for cached, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        )
        return [1, len(batch.reqs), batch.extend_num_tokens, pairs, 0, 0, 0]
    kv_tokens = sum(req.kv.kv_committed_len for req in batch.reqs)
    return [0, 0, 0, 0, 1, len(batch.reqs), kv_tokens]
