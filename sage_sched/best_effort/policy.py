"""QLLM: latency-sensitive requests before best-effort ones, which give way inside a prefill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from sage_sched.fields import LEAST_POOLS, MOST, require_within
from sage_sched.job import Job
from sage_sched.order import place_of, serving_order
from sage_sched.plan import Budget
from sage_sched.policies.sage import Sage
from sage_sched.steps.time import ServerFacts
from sage_sched.urgency.policy import Urgency, UrgencyParameters
from sage_sched.view import SchedulerView

# Requests as urgent as this, or more, are latency-sensitive.
_SENSITIVE = 2


@dataclass(frozen=True, slots=True)
class QllmParameters:
    """Settings of qllm. A pool is as many tokens as the KV pool holds.

    level_pools, decode_share, preempts: as of urgency.
    slice_ms: how long best effort may be prefilled before it gives way between two layers
        (sage_sched.best_effort.slices); 0: it does not. Experimental.
    """

    level_pools: float = 1.0
    decode_share: float = 0.1
    preempts: bool = True
    slice_ms: float = 0.0

    def __post_init__(self) -> None:
        require_within("policy.qllm.level_pools", self.level_pools, LEAST_POOLS, MOST)
        require_within("policy.qllm.decode_share", self.decode_share, 0, 1)
        require_within("policy.qllm.slice_ms", self.slice_ms, 0, MOST)


class Qllm(Urgency):
    """Two classes, after "Priority-Aware Preemptive Scheduling for Mixed-Priority Workloads in MoE
    Inference" (Siavashi et al., EuroMLSys 2025): latency-sensitive (LS), of urgency 2 or better,
    and best effort (BE); LS before BE, each by arrival.

    It is urgency with two levels and without credit. As nothing is ordered within a piece of work,
    none is rounded to: with a the work done when a job came, and P = level_pools KV pools, the key
    is a for LS and a + P for BE.

    Theorem: no BE job is behind one that came when the server had done more than P of work since.

    Proof: let k be behind which j of BE is: a_k <= key of k <= key of j = a_j + P. QED.

    Not as in the paper: there BE waits for ever if LS keeps coming; its Algorithm 1 fills prefills
    of LS with those of BE, for whose end LS then waits; and nobody of BE begins while anybody
    decodes. Here LS is prefilled by itself, and decode steps have decode_share of the time while LS
    decodes and BE is prefilled. In the paper each expert has a queue, and a batch stops at any of
    them; what that would cost and bring is in docs/results.md.
    """

    Parameters = QllmParameters  # type: ignore[assignment]
    variants = {}  # noqa: RUF012

    def __init__(self, parameters: QllmParameters, server: ServerFacts) -> None:
        as_urgency = UrgencyParameters(
            level_pools=parameters.level_pools,
            share=0.0,
            decode_share=parameters.decode_share,
            by_length=False,
            preempts=parameters.preempts,
        )
        super().__init__(as_urgency, server)
        self.slice_s = parameters.slice_ms / 1e3

    def on_arrival(self, job: Job) -> bool:
        """As sage, for whom it is; nobody claims credit."""
        return Sage.on_arrival(self, job)

    def key(self, job: Job, view: SchedulerView) -> float:
        """The work that was done when it came, and for BE what it may be overtaken by."""
        return job.served_at_arrival_tokens + (self.level(job) - _SENSITIVE) * self._piece_tokens

    def level(self, job: Job) -> int:
        """Of urgency's: 2 for LS, 3 for BE."""
        return _SENSITIVE if job.hints.urgency <= _SENSITIVE else _SENSITIVE + 1

    def budget(self, view: SchedulerView) -> Budget | None:
        """As urgency's. Those of LS that go before all of BE are prefilled by themselves: whatever
        fills their pass, their first tokens wait for."""
        budget = super().budget(view)
        if budget is not None:
            return budget
        chunked = [] if view.chunked is None else [view.chunked]
        ahead = [view.waiting[position] for position in self.ahead(view, chunked)]
        num_pages = [
            -(-_uncached(job) // view.page_size) for job in ahead if job not in view.swapped
        ]
        if not num_pages:
            return None
        # A page is left to a chunk beside them (sage_sched.chunk).
        tokens = (sum(num_pages) + 1) * view.page_size
        return Budget(prefill_tokens=tokens, reason="the latency-sensitive by themselves")

    def ahead(self, view: SchedulerView, others: Sequence[Job]) -> list[int]:
        """The positions of the waiting LS jobs that go before all of BE that waits, and before the
        others, in their order."""
        if not any(self.passes(job) for job in view.waiting):
            return []
        first = min((place_of(job, self, view) for job in others), default=(math.inf, 0))

        def is_ahead(position: int) -> bool:
            job = view.waiting[position]
            is_sensitive = job.is_ranked and self.passes(job)
            return is_sensitive and place_of(job, self, view) < first

        return [*takewhile(is_ahead, serving_order(self, view))]

    def passes(self, job: Job) -> bool:
        """Whether it is LS, and may pass a prefill of BE between two layers."""
        return self.level(job) == _SENSITIVE

    def gives_way(self, jobs: Iterable[Job]) -> bool:
        """Whether a prefill of these lets LS pass between two layers: all are BE, ranked, and not
        promised their turn."""
        return all(job.is_ranked and not job.is_promised and not self.passes(job) for job in jobs)


def _uncached(job: Job) -> int:
    """Tokens that a prefill computes for it."""
    return job.input_tokens + job.generated_tokens - job.cached_tokens
