"""Decides whether a newcomer is refused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from sage_sched.job import Job
from sage_sched.overload.config import OverloadConfig
from sage_sched.overload.waits import Newcomer
from sage_sched.overload.work import Arrivals, Pace, Unfinished, Work, row_of
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts

# One of this many requests that would be refused is admitted.
FLOOR = 50
# After a refusal, limits are multiplied by STRICT until NUM_WITHIN requests in a row were within
# them.
STRICT, NUM_WITHIN = 0.9, 64
# No request is refused unless this share of the latest ones had predictions other than the prior.
_NUM_LATEST, _LEAST_PREDICTED = 64, 0.5
# A request that misses its deadline even alone may take this many times as long as alone.
_MOST_SLOWDOWN = 2.0
# Work takes this much longer than in full batches, because the last batches are never full. Chosen
# on the tuning seeds of `bench run overload`.
_MARGIN = 1.15
# Weight of the latest prefill step in the mean number of requests that share one.
_RECENT = 1 / 64
# Arrivals within less time than this give no rate.
_LEAST_SPAN_S = 1e-3
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a newcomer is refused: its predicted TTFT or TTLT is above the limit.

    metric: ttft or ttlt. deadline_s: as it was set. The limit may be lower by a margin, or higher.
    """

    metric: str
    predicted_s: float
    limit_s: float
    deadline_s: float

    @property
    def retry_after_s(self) -> float:
        """Return the time until the prediction would be within the limit, if no others came."""
        return min(max(self.predicted_s - self.limit_s, _LEAST_RETRY_S), _MOST_RETRY_S)


class Overload:
    """Refuses newcomers that would miss their deadlines in the policy's order.

    A newcomer's last token waits for the jobs before it, and for later arrivals that overtake it.
    These are expected at the rate of the latest admitted requests. So a short request is not
    refused because long ones wait, and the server admits as much as it can serve in time. The first
    token of a request that starts ahead of the order waits for prefills alone. The prefills of
    later requests delay its other tokens.

    No request is refused while no other waits, while step times or lengths are unknown, or because
    it is slow by itself.
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
        self._arrivals = Arrivals()
        self._predicted = deque[bool](maxlen=_NUM_LATEST)
        self._together = 1.0
        self._num_over = 0
        self._num_within = NUM_WITHIN

    def arrived(self, job: Job) -> None:
        """Note that a job has come, or that these settings have been changed while it is in the
        server."""
        if self.config.enabled:
            self._unfinished.add(job)

    def prefilled(self, num_requests: int) -> None:
        """Note a prefill step of this many requests."""
        self._together += _RECENT * (max(1, num_requests) - self._together)

    def ended(self, job: Job) -> None:
        """Note that a job has ended, was aborted, or was refused."""
        self._unfinished.remove(job)

    def newcomer(self, job: Job, policy: Policy, server: ServerFacts, now_s: float) -> Newcomer:
        """Return the latest job with the facts for its predicted times. The job has been ranked."""
        rows = self._unfinished.rows(now_s, policy, server, but=job)
        if not len(rows):
            self._arrivals.clear()
        row = row_of(job, policy, server)
        own, total = Work.of_quantum(row[None]), Work.of_quantum(rows)
        before = Work.ahead_of(row, rows, ties=True)
        latest, span_s = Work(), self._arrivals.span_s(now_s)
        admitted = self._arrivals.admitted()
        rate = admitted.jobs / max(span_s, _LEAST_SPAN_S) if policy.starts_early else None
        pace = Pace.of(total + own, server, self._together, rate)
        if pace.busy_s(self._arrivals.offered()) >= _MARGIN * span_s:
            latest = self._arrivals.ahead_of(row) * _MARGIN
        fresh = Work.started_with(row, rows) if policy.starts_early else None
        early = admitted if policy.starts_early else Work()
        return Newcomer(row, own, before, fresh, latest, span_s, early, pace)

    def refuses(
        self, job: Job, newcomer: Newcomer, now_s: float, *, may_refuse: bool
    ) -> Refusal | None:
        """Decide about the latest job; None admits it.

        may_refuse: whether another request waits, and the step times are those of this server.
        """
        self._predicted.append(job.distribution is not None and job.distribution.source != "prior")
        refusal = self.would_refuse(job, newcomer) if may_refuse else None
        if refusal is not None:
            self._num_within = 0
            self._num_over += 1
            if self._num_over % FLOOR == 0:
                refusal = None
        else:
            self._num_within += 1
        self._arrivals.add(now_s, newcomer.row, admitted=refusal is None)
        return refusal

    def would_refuse(self, job: Job, newcomer: Newcomer) -> Refusal | None:
        """Return the refusal of a newcomer if others wait, without the floor. Changes nothing."""
        if not job.is_ranked or job.distribution is None:
            return None
        return self._over(newcomer, self.config.deadlines_s(job.hints, self._classes_ms))

    def _over(self, newcomer: Newcomer, deadlines_s: tuple[float, float]) -> Refusal | None:
        if sum(self._predicted) < _LEAST_PREDICTED * len(self._predicted):
            return None
        strict = STRICT if self._num_within < NUM_WITHIN else 1.0
        ttft_s, tpot_s = deadlines_s
        limit_s = strict * max(ttft_s, _MOST_SLOWDOWN * newcomer.first_s)
        predicted_s = newcomer.ttft_s
        if newcomer.fresh is None:
            predicted_s = newcomer.first_s + newcomer.waited_s(limit_s - newcomer.first_s)
        if predicted_s > limit_s:
            return Refusal("ttft", predicted_s, limit_s, ttft_s)
        if math.inf in (ttft_s, tpot_s):
            return None
        in_time_s = ttft_s + newcomer.own.steps * tpot_s
        limit_s = strict * max(in_time_s, _MOST_SLOWDOWN * newcomer.alone_s)
        served_s = newcomer.alone_s + newcomer.stopped_s(limit_s)
        predicted_s = served_s + newcomer.waited_s(limit_s - served_s)
        if predicted_s > limit_s:
            return Refusal("ttlt", predicted_s, limit_s, in_time_s)
        return None
