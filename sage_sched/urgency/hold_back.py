"""Prefills are held back while somebody urgent decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.view import SchedulerView

# Prefills of others are held back for requests of this level or better.
_URGENT = 2


class HoldBack:
    """Keeps a share of the server's time for decode steps while somebody urgent decodes and only
    less urgent requests wait."""

    def __init__(self, decode_share: float, level_of: Callable[[Job], int]) -> None:
        """decode_share: 0: prefills are not held back; 1: they all are."""
        self._share = decode_share
        self._level_of = level_of
        self._owed_steps = 0
        self._prefills_since_tokens: int | None = None

    def budget(self, view: SchedulerView) -> Budget | None:
        """After a prefill only decode steps, until running jobs have had their share."""
        # The server's work since the last pass, if that was allowed to prefill.
        since_tokens, self._prefills_since_tokens = self._prefills_since_tokens, None
        worked_tokens = 0 if since_tokens is None else view.served_tokens - since_tokens
        if not self._holds_back(view):
            self._owed_steps = 0
            return None
        share, step_time = self._share, view.server.step_time
        decode_s = step_time.decode_s(len(view.running), view.running_kv_tokens)
        if worked_tokens:
            prefill_s = step_time.prefill_s(1, worked_tokens, 0.0)
            self._owed_steps = math.ceil(prefill_s * share / max(1e-9, 1 - share) / decode_s)
        if share == 1 or self._owed_steps > 0:
            self._owed_steps -= 1
            return Budget(prefill_tokens=0)
        self._prefills_since_tokens = view.served_tokens
        return None

    def _holds_back(self, view: SchedulerView) -> bool:
        """Whether somebody urgent decodes, and only less urgent jobs wait for a prefill."""
        if not self._share or view.batch_is_full:
            return False
        best = self._best_level(view.running)
        waiting = [job for job in view.waiting if job not in view.swapped]
        if view.chunked is not None:
            waiting.append(view.chunked)
        return best <= _URGENT and self._best_level(waiting) > best

    def _best_level(self, jobs: Iterable[Job]) -> int:
        return min((self._level_of(job) for job in jobs if job.is_ranked), default=6)
