"""Decides whether a newcomer is refused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sage_sched.job import Hints, Job
from sage_sched.overload.config import OverloadConfig
from sage_sched.overload.pace import Pace
from sage_sched.overload.waits import NEVER, Newcomer, Repeated
from sage_sched.overload.work import (
    MOST,
    Arrivals,
    Unfinished,
    ahead_of,
    column_of,
    level_of,
    total_work,
    work_of,
    work_since_each,
)
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts

# One that would be refused is admitted after this many others, while limits are stricter. So the
# history learns even of requests that seem hopeless.
FLOOR = 50
# After a refusal, limits are multiplied by STRICT until NUM_WITHIN requests in a row were within
# them.
STRICT, NUM_WITHIN = 0.9, 64
# No request is refused unless this share of the latest ones had predictions other than the prior.
_NUM_LATEST, _LEAST_PREDICTED = 64, 0.5
# A request that misses its deadline even alone may take this many times as long as alone.
_MOST_SLOWDOWN = 2.0
# Work takes this much longer than in full batches, because batches are not always full, and because
# the device idles while KV is moved and the host prepares the next step. At 30/s, of which 5/s fit,
# 0.95 of the admitted are good; with 1.15, 0.88.
MARGIN = 1.5
# Arrivals overtake if they bring this share of the work that full batches serve. With 1.15, 0.83 of
# the admitted are good at the rate that just fits; with 0.9, all.
BEYOND = 0.9
# Weight of the latest prefill step in the mean number of requests that share one.
_RECENT = 1 / 64
# The least time in which arrivals give a rate, and the least number of them.
_LEAST_SPAN_S, _LEAST_NUM = 1e-3, 16
# Of the latest n arrivals, for n from MOST down to 1: n, and the share of work that is no chance.
_COUNTS = np.arange(MOST, 0, -1.0)
_SURE = 1 - 2 / np.sqrt(_COUNTS)
# OpenAI's clients ignore a longer Retry-After.
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a newcomer is refused: its predicted TTFT or TTLT is above the limit.

    metric: ttft or ttlt. deadline_s: as it was set. The limit may be lower by a margin, or higher.
    retry_after_s: when it may come back.
    """

    metric: str
    predicted_s: float
    limit_s: float
    deadline_s: float
    retry_after_s: float = 0.0


class Overload:
    """Refuses newcomers that would miss their deadlines in the policy's order.

    A newcomer's last token waits for the jobs before it, and for later arrivals that overtake it.
    These are expected at the rate of the latest admitted requests. So a short request is not
    refused because long ones wait, and the server admits as much as it can serve in time. The first
    token of a request that starts ahead of the order waits for prefills alone. The prefills of
    later requests delay its other tokens.

    No request is refused while no other waits, while step times or lengths are unknown, or because
    it is slow by itself.

    Refused requests are told to come back one after another, as the server has time for them.
    """

    def __init__(
        self,
        config: OverloadConfig,
        classes_ms: Mapping[str, tuple[float, float]] = {},
    ) -> None:
        """classes_ms: see OverloadConfig.deadlines_s."""
        self.config = config
        self._classes_ms = classes_ms
        self._unfinished = Unfinished()
        self._offered, self._admitted = Arrivals(), Arrivals()
        self._predicted = deque[bool](maxlen=_NUM_LATEST)
        self._together = 1.0
        self._num_admitted = 0
        self._num_within = NUM_WITHIN
        self._num_offered = 0
        self._next_return_s = -math.inf
        self._revision = 0

    def arrived(self, job: Job) -> None:
        """Note that a job has come, or that these settings have been changed while it is in the
        server."""
        job.ttft_s = self._deadlines_s(job.hints)[0]
        if self.config.enabled:
            self._unfinished.add(job)

    def prefilled(self, num_requests: int) -> None:
        """Note a prefill step of this many requests."""
        self._together += _RECENT * (max(1, num_requests) - self._together)

    def ended(self, job: Job) -> None:
        """Note that a job has ended, was aborted, or was refused."""
        self._unfinished.remove(job)

    def _deadlines_s(self, hints: Hints) -> tuple[float, float]:
        config = self.config if self.config.enabled else OverloadConfig()
        return config.deadlines_s(hints, self._classes_ms if self.config.enabled else {})

    def newcomer(self, job: Job, policy: Policy, server: ServerFacts, now_s: float) -> Newcomer:
        """Return the latest job with the facts for its predicted times. The job has been ranked."""
        if policy.revision != self._revision:
            self._revision = policy.revision
            rise = self._unfinished.revise(policy, server.step_time)
            for arrivals in (self._offered, self._admitted):
                arrivals.revise(rise, server.step_time)
        table = self._unfinished.table(now_s, policy, server.step_time, but=job)
        if not table.size:
            self._offered.clear()
            self._admitted.clear()
        column = column_of(job, policy, server.step_time, now_s)
        own = work_of(column, in_place=True)
        before = total_work(table, *ahead_of(column, table, ties=True))
        admitted = self._admitted.table
        span_s = np.maximum(now_s - self._admitted.came_s, _LEAST_SPAN_S)
        rate = 0.0
        if policy.starts_early and span_s.size:
            number = max(1, len(span_s) - _LEAST_NUM)
            rate = float((_COUNTS[-len(span_s) :][:number] / span_s[:number]).max())
        in_place = self._unfinished.in_place
        pace = Pace.of(in_place + own, server, self._together, rate)
        later = starts = NEVER
        is_beyond = self._is_beyond(pace, now_s)
        if is_beyond.any():
            work = work_since_each(admitted, *ahead_of(column, admitted, ties=False))
            later = Repeated(MARGIN * pace.busy_s(work) * is_beyond, span_s)
        fresh = None
        if policy.starts_early:
            chosen = level_of(column, table)
            fresh = in_place if chosen is None else total_work(table, chosen)
            early = self._admitted.since_each
            # No faster than the server serves them.
            starts_s = pace.starts_s(early)
            starts = Repeated(starts_s, np.maximum(span_s, starts_s + pace.steps_s(early)))
        return Newcomer(column, own, before, fresh, later, starts, pace, job.ttft_s)

    def _is_beyond(self, pace: Pace, now_s: float) -> Any:
        """Return, for the time since each admitted arrival, whether more work has come than the
        server serves, refused or not. Of n arrivals, twice the root of n may be
        chance."""
        offered, came_s = self._offered, self._offered.came_s
        if not came_s.size:
            return np.zeros(0, bool)
        places = self._admitted.numbers - offered.numbers[0]
        busy_s = pace.busy_s(offered.since_each) * _SURE[-len(came_s) :]
        return (busy_s >= BEYOND * (now_s - came_s)).take(places, mode="clip")

    def refuses(
        self, job: Job, newcomer: Newcomer, now_s: float, *, may_refuse: bool
    ) -> Refusal | None:
        """Decide about the latest job; None admits it.

        may_refuse: whether another request waits, and the step times are those of this server.
        """
        self._predicted.append(job.distribution is not None and job.distribution.source != "prior")
        refusal = self.would_refuse(job, newcomer) if may_refuse else None
        self._num_within = 0 if refusal is not None else self._num_within + 1
        is_strict = self._num_within < NUM_WITHIN
        self._num_admitted = self._num_admitted + (refusal is None) if is_strict else 0
        if refusal is not None and self._num_admitted >= FLOOR:
            refusal, self._num_admitted = None, 0
        self._num_offered += 1
        self._offered.add(newcomer.column, self._num_offered)
        if refusal is None:
            self._admitted.add(newcomer.column, self._num_offered)
            self._unfinished.put(job, newcomer.column)
            return None
        wait_s = max(refusal.predicted_s - refusal.limit_s, _LEAST_RETRY_S)
        return_s = min(max(now_s + wait_s, self._next_return_s), now_s + _MOST_RETRY_S)
        self._next_return_s = return_s + float(newcomer.pace.busy_s(newcomer.own))
        return replace(refusal, retry_after_s=return_s - now_s)

    def would_refuse(self, job: Job, newcomer: Newcomer) -> Refusal | None:
        """Return the refusal of a newcomer if others wait, without the floor. Changes nothing."""
        if not job.is_ranked or job.distribution is None:
            return None
        return self._over(newcomer, self._deadlines_s(job.hints))

    def _over(self, newcomer: Newcomer, deadlines_s: tuple[float, float]) -> Refusal | None:
        if sum(self._predicted) < _LEAST_PREDICTED * len(self._predicted):
            return None
        strict = STRICT if self._num_within < NUM_WITHIN else 1.0
        ttft_s, tpot_s = deadlines_s
        limit_s = strict * max(ttft_s, _MOST_SLOWDOWN * newcomer.first_s)
        predicted_s = newcomer.start_s  # a job is not held beyond its deadline
        if newcomer.fresh is None:
            predicted_s = newcomer.first_s + newcomer.waited_s(limit_s - newcomer.first_s)
        if predicted_s > limit_s:
            return Refusal("ttft", predicted_s, limit_s, ttft_s)
        if math.inf in (ttft_s, tpot_s):
            return None
        in_time_s = ttft_s + newcomer.own.steps * tpot_s
        limit_s = strict * max(in_time_s, _MOST_SLOWDOWN * newcomer.alone_s)
        served_s = newcomer.alone_s + newcomer.starts.within(limit_s)
        predicted_s = served_s + newcomer.waited_s(limit_s - served_s)
        if predicted_s > limit_s:
            return Refusal("ttlt", predicted_s, limit_s, in_time_s)
        return None
