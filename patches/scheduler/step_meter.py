"""What a scheduler's steps have to do, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from patches.engine_types import Batch


def ends_with_launch(device: str) -> bool:
    """Whether a step is over when its launch returns. An accelerator is still at it then; that it
    is done is known when its result has been processed."""
    return device == "cpu"


class Learner(Protocol):
    """Who is told of steps."""

    def add(self, work: Sequence[float], seconds: float) -> None:
        """What a step had to do (sage_sched.steps.fit.COLUMNS), and how long it took."""


class StepMeter:
    """Tells a learner of each step.

    A step takes from the end of the one before to its own, so that whatever a busy server does
    between two steps counts, and under overlap none counts twice. Not so after an idle time, when
    it takes from its launch, nor if something else came between: then it is not told of.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._since_s: float | None = None

    def launched(self, batch: Batch, after_idle: bool) -> list[float] | None:
        """A batch is about to run: what it has to do, for ended(); None if it is no step."""
        if after_idle:
            self._since_s = time.perf_counter()
        return _work(batch)

    def cut(self) -> float | None:
        """A step gives way to others: what it has taken, since it was cut last; None if unknown."""
        now_s = time.perf_counter()
        since_s, self._since_s = self._since_s, now_s
        return None if since_s is None else now_s - since_s

    def ended(self, work: list[float] | None, cut_s: Sequence[float | None] = ()) -> None:
        """A step is over. cut_s: what cut() has said of it."""
        now_s = time.perf_counter()
        before_s = [seconds for seconds in cut_s if seconds is not None]
        is_known = len(before_s) == len(cut_s) and self._since_s is not None
        if work is not None and is_known:
            assert self._since_s is not None
            self._learner.add(work, now_s - self._since_s + sum(before_s))
        self._since_s = now_s

    def interrupted(self) -> None:
        """Something that is no part of a step takes time."""
        self._since_s = None


def _work(batch: Batch) -> list[float] | None:
    """sage_sched.steps.fit.COLUMNS of a batch (sglang/srt/managers/schedule_batch.py,
    ScheduleBatch). A mixed one reads the weights once, so it is no decode step beside."""
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return None
    if not mode.is_extend_without_speculative():
        kv_tokens = sum(req.kv.kv_committed_len for req in batch.reqs)
        return [0, 0, 0, 0, 1, len(batch.reqs), kv_tokens]
    num_decoding = len(batch.decoding_reqs) if mode.is_mixed() else 0
    num_prefills = len(batch.reqs) - num_decoding
    cached, new = batch.prefix_lens[:num_prefills], batch.extend_lens[:num_prefills]
    pairs = sum(n * (c + n / 2) for c, n in zip(cached, new, strict=True))
    decoding_kv_tokens = sum(batch.prefix_lens[num_prefills:])
    return [1, num_prefills, sum(new), pairs, 0, num_decoding, decoding_kv_tokens]
