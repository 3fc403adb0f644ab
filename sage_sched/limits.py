"""Holds the rules of a pass that apply under every policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from sage_sched.adapters import Adapters
from sage_sched.gap import Gap
from sage_sched.interleaving import Interleaving
from sage_sched.job import Job
from sage_sched.overload import Overload, OverloadConfig
from sage_sched.session_returns import SessionReturns
from sage_sched.swap_out_bound import SwapOutBound


@dataclass(slots=True, eq=False)
class Limits:
    """The limits that a policy's order must keep. sage_sched.app makes them together with the
    policy.

    gap: bounds the time between two tokens of a running job.
    swap_out: bounds the time between two tokens of a swapped-out job.
    interleaving: may let tenants take turns.
    adapters: shares the slots of LoRA adapters.
    overload: refuses new requests whose answers would come too late.
    sessions: predicts when sessions come back, to keep their KV; None if no KV is kept for them.
    """

    gap: Gap = field(default_factory=Gap)
    swap_out: SwapOutBound = field(default_factory=SwapOutBound)
    interleaving: Interleaving = field(default_factory=Interleaving)
    adapters: Adapters = field(default_factory=Adapters)
    overload: Overload = field(default_factory=lambda: Overload(OverloadConfig()))
    sessions: SessionReturns | None = None

    @property
    def needs_clock(self) -> bool:
        """Whether any of them reads SchedulerView.now_s or Job.arrival_s."""
        has_sessions = self.sessions is not None and self.sessions.saw_any
        has_any = has_sessions or self.adapters.needs_clock
        return has_any or self.overload.config.enabled or self.swap_out.needs_clock

    def arrived(self, job: Job, before: Limits | None = None) -> None:
        """Note that a job has arrived, or that these limits apply to it because the settings have
        changed.

        before: the limits until then. What they have in common with these knows the job.
        """
        self.adapters.arrived(job)
        if before is None or self.overload is not before.overload:
            self.overload.arrived(job)
        if self.sessions is None or not job.hints.session:
            return
        if before is None or self.sessions is not before.sessions:
            self.sessions.came(job.hints.session, job.arrival_s)

    def prefilled(self, num_requests: int, num_tokens: int, num_pairs: float) -> None:
        """Note that a prefill step has run; see StepTime."""
        self.gap.prefilled(num_requests, num_tokens, num_pairs)
        self.overload.prefilled(num_requests)

    def ended(self, job: Job, now_s: float) -> None:
        """Note that a job has ended, was aborted, or was refused."""
        self.overload.ended(job)
        if self.sessions is not None and job.hints.session:
            # The claims of the others are about a time after an answer.
            was_answered = job.generated_tokens > 0
            next_in_s = job.hints.next_in_s if was_answered else None
            self.sessions.left(job.hints.session, now_s, next_in_s, was_answered=was_answered)
