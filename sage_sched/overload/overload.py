"""Decides whether a newcomer is refused."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sage_sched.job import Hints, Job
from sage_sched.limit import Limit
from sage_sched.overload.arrivals import Arrivals
from sage_sched.overload.config import OverloadConfig
from sage_sched.overload.pace import Work
from sage_sched.overload.returns import Returns
from sage_sched.overload.situation import Situation
from sage_sched.overload.trust import Trust
from sage_sched.overload.waits import Newcomer
from sage_sched.overload.work import FEW, KEPT_S, Unfinished, column_of, unfilled_tokens, work_of
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts, StepTime

# A request that would be refused is admitted after this many others, while limits are stricter. So
# the history learns even of requests that seem hopeless.
FLOOR = 50
# After a refusal, limits are multiplied by STRICT until NUM_WITHIN requests in a row were within
# them.
STRICT, NUM_WITHIN = 0.9, 64
# No request is refused unless this share of the latest ones had predictions other than the prior.
_NUM_LATEST, _LEAST_PREDICTED = 64, 0.5
# A request that would miss its deadline even alone may take this many times its time alone.
_MOST_SLOWDOWN = 2.0
# Weight of the latest prefill step in the mean number of requests that share one.
_RECENT = 1 / 64


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


class Overload(Limit):
    """Refuses newcomers that would miss their deadlines in the policy's order.

    A newcomer's last token waits for the jobs before it, and for later arrivals that overtake it.
    These are expected at the rate of the latest admitted requests. So a short request is not
    refused because long ones wait, and the server admits as much as it can serve in time. The first
    token of a request that starts ahead of the order waits for prefills alone. The prefills of
    later requests delay its other tokens.

    No request is refused while step times or lengths are unknown, or because it is slow by itself.
    If no other request waits, a request is refused only if the batch that it joins decodes too
    slowly for it, as batches that share a long prompt can.

    Refusing stops while answers take far less than their predicted times (Trust).

    Refused requests may come back one after another, as the server has time for them.
    """

    def __init__(
        self,
        config: OverloadConfig,
        classes_ms: Mapping[str, tuple[float, float]] = {},
    ) -> None:
        """classes_ms: see OverloadConfig.deadlines_s.

        was_sampled: whether the latest job was admitted although it was predicted to be late.
        """
        self.config = config
        self._classes_ms = classes_ms
        self._unfinished = Unfinished()
        self._offered, self._admitted = Arrivals(), Arrivals()
        # The latest situation, when it was looked at, and how many arrivals and admissions make it
        # outdated.
        self._situation: tuple[Situation, float, float, float] | None = None
        self._predicted = deque[bool](maxlen=_NUM_LATEST)
        self._together = 1.0
        self._num_admitted = 0
        self._num_within = NUM_WITHIN
        self._num_offered = self._num_taken = 0
        self._returns = Returns()
        self.trust = Trust()
        self.was_sampled = False
        self._step_time: StepTime | None = None

    def arrived(self, job: Job) -> None:
        job.ttft_s = self._deadlines_s(job.hints)[0]
        if self.config.enabled:
            self._unfinished.add(job)

    def prefilled(self, num_requests: int, num_tokens: int, num_pairs: float) -> None:
        self._together += _RECENT * (max(1, num_requests) - self._together)

    def ended(self, job: Job, now_s: float) -> None:
        self._unfinished.remove(job)

    def _deadlines_s(self, hints: Hints) -> tuple[float, float]:
        if not self.config.enabled:
            return OverloadConfig().deadlines_s(hints, {})
        return self.config.deadlines_s(hints, self._classes_ms)

    def newcomer(self, job: Job, policy: Policy, server: ServerFacts, now_s: float) -> Newcomer:
        """Return the latest job with the facts for its predicted times. The job has been ranked."""
        before = self._step_time
        if before is not None and before is not server.step_time:
            rise = self._unfinished.revise(policy, server.step_time)
            for arrivals in (self._offered, self._admitted):
                arrivals.revise(rise, server.step_time)
            self._situation = None
        self._step_time = server.step_time
        column = column_of(job, policy, server.step_time, now_s)
        own = work_of(column)
        situation = self._situation_at(now_s, job, own, policy, server)
        ahead, later = situation.ahead(column)
        longest_s = server.step_time.longest_start_s(policy.traits.starts_within_s)
        fresh = situation.fresh(column, longest_s) if own.prompts_s < longest_s else None
        pace, starts = situation.pace, situation.starts
        return Newcomer(column, own, ahead, fresh, later, starts, pace, job.ttft_s)

    def _situation_at(
        self, now_s: float, job: Job, own: Work, policy: Policy, server: ServerFacts
    ) -> Situation:
        """Return the situation of a moment ago, or look at it for a newcomer with this work."""
        if self._situation is not None:
            situation, at_s, most_offered, most_admitted = self._situation
            is_few = self._num_offered <= most_offered and self._num_taken <= most_admitted
            if is_few and 0 <= now_s - at_s < KEPT_S:
                return situation
        table = self._unfinished.table(now_s, policy, server.step_time, but=job)
        if not table.size:
            self._offered.clear()
            self._admitted.clear()
        situation = Situation.of(
            table, self._unfinished.in_place, self._offered, self._admitted, server,
            self._together, now_s, own=own, starts_early=policy.traits.starts_within_s > 0,
        )  # fmt: skip
        most_offered = self._num_offered + FEW * len(self._offered)
        most_admitted = self._num_taken + FEW * situation.in_place.jobs
        self._situation = situation, now_s, most_offered, most_admitted
        return situation

    def refuses(
        self,
        job: Job,
        newcomer: Newcomer,
        now_s: float,
        *,
        may_refuse: bool,
        others_wait: bool = True,
    ) -> Refusal | None:
        """Decide about the latest job; None admits it.

        may_refuse: whether other requests are unfinished, and the step times are those of this
            server. others_wait: whether one of them waits. If none does, the newcomer is refused
            only if the batch that it joins decodes too slowly.
        """
        self._predicted.append(job.distribution.source not in ("prior", "none"))
        may_refuse &= not self.trust.is_lost
        refusal = self.would_refuse(job, newcomer, others_wait) if may_refuse else None
        self._num_within = 0 if refusal is not None else self._num_within + 1
        is_strict = self._num_within < NUM_WITHIN
        self._num_admitted = self._num_admitted + (refusal is None) if is_strict else 0
        self.was_sampled = refusal is not None and self._num_admitted >= FLOOR
        if self.was_sampled:
            refusal, self._num_admitted = None, 0
        self._num_offered += 1
        self._offered.add(newcomer.column, self._num_offered)
        if refusal is None:
            self._num_taken += 1
            self._admitted.add(newcomer.column, self._num_offered)
            self._unfinished.put(job, newcomer.column)
            return None
        wait_s = refusal.predicted_s - refusal.limit_s
        own_s = float(newcomer.pace.busy_s(newcomer.own))
        return replace(refusal, retry_after_s=self._returns.after_s(now_s, wait_s, own_s))

    def overflows(self, job: Job, queued_tokens: int) -> bool:
        """Whether the newcomer's prompt is too long to wait too. This needs no predictions.

        queued_tokens: the unfilled tokens of the jobs that wait or are being chunked.
        """
        most = self.config.max_queued_tokens
        return 0 < most < queued_tokens + unfilled_tokens(job) and queued_tokens > 0

    def answered(self, job: Job, predicted_s: float, now_s: float, *, was_sampled: bool) -> None:
        """Note the last token of a job that came while others waited; see Trust."""
        ttft_s, tpot_s = self._deadlines_s(job.hints)
        real_s, due_s = now_s - job.arrival_s, ttft_s + job.generated_tokens * tpot_s
        self.trust.answered(real_s, predicted_s, due_s, was_sampled=was_sampled)

    def would_refuse(self, job: Job, newcomer: Newcomer, others_wait: bool) -> Refusal | None:
        """Return the refusal of a newcomer, without the floor. Changes nothing."""
        if not job.is_predicted or job.batch is not None:
            return None
        if sum(self._predicted) < _LEAST_PREDICTED * len(self._predicted):
            return None
        strict = STRICT if self._num_within < NUM_WITHIN else 1.0
        ttft_s, tpot_s = self._deadlines_s(job.hints)
        if not others_wait:
            has_both = math.inf not in (ttft_s, tpot_s)
            return self._too_slow(newcomer, tpot_s, strict) if has_both else None
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
        served_s = newcomer.served_s + newcomer.starts.within(limit_s)
        predicted_s = served_s + newcomer.waited_s(limit_s - served_s)
        if predicted_s > limit_s:
            return Refusal("ttlt", predicted_s, limit_s, in_time_s)
        return None

    def _too_slow(self, newcomer: Newcomer, tpot_s: float, strict: float) -> Refusal | None:
        """Return the refusal of a newcomer that starts at once, if its TPOT would be too long."""
        in_time_s = newcomer.first_s + newcomer.own.steps * tpot_s
        limit_s = strict * max(in_time_s, _MOST_SLOWDOWN * newcomer.alone_s)
        # Without a queue a short period is no rate: it may hold the first prefill of a long prefix.
        predicted_s = newcomer.served_s + newcomer.starts.within(limit_s, most_periods=1.0)
        if predicted_s <= limit_s:
            return None
        return Refusal("ttlt", predicted_s, limit_s, in_time_s)
