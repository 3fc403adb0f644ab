"""Implements QLLM, which serves latency-sensitive requests before best-effort ones, and preempts
best-effort requests inside a prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from sage_sched.fields import Share
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.policy import Lasting
from sage_sched.urgency import Urgency, UrgencyParameters
from sage_sched.view import SchedulerView
from sage_sched.waiting_queue import WaitingQueue, place_of

# Requests of this urgency, or a better one, are latency-sensitive.
_SENSITIVE = 2


@dataclass(frozen=True, slots=True)
class QllmParameters(UrgencyParameters):
    """Settings of qllm. They mean the same as the settings of urgency."""

    decode_share: Share = 0.1


class Qllm(Urgency):
    """Serves two classes, latency-sensitive (LS, urgency 2 or better) and best effort (BE).

    LS goes before BE, and each class is served by arrival. After "Priority-Aware Preemptive
    Scheduling for Mixed-Priority Workloads in MoE Inference" (Siavashi et al., EuroMLSys 2025).

    Let a be the work that the server had done when a job came, and P = level_pools KV pools. The
    key is a for LS and a + P for BE.

    Theorem: no BE job is behind a job that came after the server had done more than P of work since
    the BE job came.

    Proof: let k be ahead of a BE job j: a_k <= key of k <= key of j = a_j + P. QED.

    This differs from the paper. There, BE waits for ever if LS keeps coming. The paper's Algorithm
    1 fills up prefills of LS with prompts of BE, so that LS waits for their end, and it begins no
    BE job while any job decodes. Here, LS is prefilled by itself. While LS decodes and BE is
    prefilled, decode steps have decode_share of the time. In the paper each expert has a queue, and
    a batch stops at any expert. Here only the simulator stops a prefill, between layers.
    """

    Parameters = QllmParameters

    def key(self, job: Job, view: SchedulerView) -> float:
        return self._key(job)

    def _key(self, job: Job) -> float:
        return job.served_at_arrival_tokens + (0.0 if self.passes(job) else self._piece_tokens)

    def lasting(self, job: Job) -> Lasting:
        """Return a job's forecast. It keeps its key to its end."""
        steps = super().lasting(job).steps
        return Lasting(self._key(job), steps, steps)

    def level(self, job: Job) -> int:
        """Return the level of the job's class, LS or BE."""
        return _SENSITIVE if self.passes(job) else _SENSITIVE + 1

    def budget(self, view: SchedulerView, queue: WaitingQueue) -> Budget | None:
        """Hold BE back while LS decodes. LS jobs that go before all of BE are prefilled by
        themselves, because their first tokens wait for all prefills of their pass."""
        if (budget := super().budget(view, queue)) is not None:
            return budget
        ahead = [view.waiting[position] for position in self.ahead(view, queue, view.chunked_jobs)]
        prompts = [view.uncached_tokens(job) for job in ahead if job not in view.swapped]
        if not prompts:
            return None
        # One page is left for the chunk of another prompt in this pass (sage_sched.candidates).
        return Budget(prefill_tokens=sum(prompts) + view.page_size)

    def ahead(self, view: SchedulerView, queue: WaitingQueue, others: Sequence[Job]) -> list[int]:
        """Return, in order, the positions of the waiting LS jobs that go before all waiting BE jobs
        and before all of `others`. Jobs without an adapter slot are left out, because other jobs
        overtake them."""
        first = min((place_of(job, self, view) for job in others), default=(math.inf, 0.0, 0))

        def is_ahead(position: int) -> bool:
            job = view.waiting[position]
            return self.passes(job) and place_of(job, self, view) < first

        return [*takewhile(is_ahead, queue.order(view))]

    def passes(self, job: Job) -> bool:
        """Whether the job is LS."""
        return job.hints.urgency <= _SENSITIVE
