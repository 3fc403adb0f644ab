"""Keeps a Job for every request of one scheduler, and counts served tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from patches.carrier import CLOCK, came_at_s, decode, decode_batch, decode_hints, is_dry_run
from patches.engine_types import Batch, Req, Scheduler
from patches.listener import Listener
from patches.messages import Tick
from patches.scheduler.priorities import level_of
from patches.scheduler.request import RequestState, Waits
from patches.scheduler.survival import why_not_preemptible, why_not_retractable
from sage_sched.distribution import UNKNOWN, LengthDistribution
from sage_sched.followed import Followed, in_front
from sage_sched.job import NO_HINTS, BatchPart, Job
from sage_sched.limits import Limits
from sage_sched.plan import Plan
from sage_sched.policy import Policy
from sage_sched.scheduler import Scheduler as Core
from sage_sched.steps import attended_pairs

_ONE_TOKEN = LengthDistribution.from_samples([1], "truth")


class Jobs(Listener):
    """The jobs of one scheduler. All ranks see the same requests in the same order and count the
    same tokens.

    waiting: the jobs of the waiting queue, in its order, kept from pass to pass. Most of a long
        queue stays as the last plan left it, and costs no work.
    req_of: their requests. begun: the waiting requests with output tokens.
    """

    def __init__(self, scheduler: Scheduler, core: Core) -> None:
        self._scheduler, self._core = scheduler, core
        self._mode: str = scheduler.server_args.disaggregation_mode
        self._num_servers: int = scheduler.server_args.dp_size
        self.recomputed_tokens = 0
        self.waiting: list[Job] = []
        self.req_of: dict[Job, Req] = {}
        self.begun: dict[Req, None] = {}
        self._queue = Followed[Req]()
        self._undated: list[tuple[Job, Req]] = []
        # The number of decode steps, the requests of the latest one, and the number of steps that
        # are counted in their jobs' served_tokens, or came before. Counting each step for each job
        # would take longer.
        self._num_decodes, self._batch = 0, Followed[Req]()
        self._counted: dict[Job, int] = {}
        self._num_predicted: Counter[str] = Counter()
        self._num_malformed = 0

    def arrived(self, req: Req) -> None:
        """Attach a Job to a new request."""
        job = Job(
            arrival=self._core.num_arrivals,
            input_tokens=len(req.origin_input_ids),
            max_new_tokens=max(1, req.sampling_params.max_new_tokens),
            distribution=self._carried(decode, req, None) or UNKNOWN,
            served_at_arrival_tokens=self._core.served_tokens,
            arrival_s=self._core.now_s,
            hints=self._carried(decode_hints, req, NO_HINTS),
            has_fixed_length=req.sampling_params.ignore_eos,
            keeps_memory=req.session is not None,
            is_pinned=self._is_pinned(req),
            adapter=req.lora_id or "",
            level=level_of(req, self._scheduler),
            batch=self._part_of(req),
        )
        if self._mode == "prefill":  # a prefill server generates one token
            job.max_new_tokens, job.distribution = 1, _ONE_TOKEN
        elif self._mode == "decode":  # the prompt is prefilled on another server
            job.cached_tokens = job.input_tokens
        self._core.arrived(job)
        self._undated.append((job, req))
        # A request's wait begins at its arrival: its wait for a prediction counts too.
        came_s = came_at_s(req.sampling_params.custom_params, time.monotonic())
        req.sage = RequestState(job, Waits(came_s, since_s=came_s))
        if is_dry_run(req.sampling_params.custom_params):
            return
        self._num_predicted[job.distribution.source] += 1

    def _is_pinned(self, req: Req) -> bool:
        """See Job.is_pinned. A decode server resumes what it retracts from a copy of its KV."""
        if self._mode == "decode" or why_not_retractable(req) is None:
            return False
        preemption = self._scheduler.sage.preemption
        can_swap = preemption is not None and preemption.config.enabled
        return not can_swap or why_not_preemptible(req) is not None

    def switch(self, policy: Policy, limits: Limits, unfinished: Sequence[Req]) -> None:
        """Let a new policy rank all requests, and new limits know them."""
        self._settle_all()
        for req in unfinished:
            req.sage.job.is_pinned = self._is_pinned(req)
        self._core.switched(policy, limits, [req.sage.job for req in unfinished])

    def _carried(self, decoded: Any, req: Req, otherwise: Any) -> Any:
        try:
            return decoded(req.sampling_params.custom_params)
        except ValueError:
            self._num_malformed += 1
            return otherwise

    def _part_of(self, req: Req) -> BatchPart | None:
        part: BatchPart | None = self._carried(decode_batch, req, None)
        return None if part is None else replace(part, num_servers=self._num_servers)

    def ticked(self, now_s: float, clock: str = CLOCK) -> None:
        """Take in rank 0's clock, which arrives after the requests of the same broadcast.

        clock: its name (patches.carrier).
        """
        self._core.now_s = now_s
        for job, req in self._undated:
            job.arrival_s = came_at_s(req.sampling_params.custom_params, now_s, clock)
        self._undated.clear()

    def polled(self) -> Tick:
        """Return a tick of rank 0's clock. It arrives after the requests of its broadcast."""
        return Tick(now_s=time.monotonic(), clock=CLOCK)

    def ran(self, batch: Batch) -> None:
        """Count the tokens that a batch computes, prefill or decode."""
        # Trap: a batch that goes on to decode keeps the extend_num_tokens of its prefill.
        if batch.forward_mode.is_extend_without_speculative():
            # The whole batch decodes if SGLang uses a prefill-like step because a peer prefills.
            num_mixed = len(batch.decoding_reqs or [])
            jobs = [req.sage.job for req in batch.reqs]
            if self._mode != "decode":
                # An estimate of the KV that their ends do not free: other requests may share the
                # prefixes that they have just found in the radix tree.
                for job, req in zip(jobs, batch.reqs, strict=True):
                    job.cached_tokens = req.cached_tokens
            if num_mixed:
                self._core.worked(jobs, batch.extend_lens)
                self._core.decoded(0)
            else:
                pairs = sum(map(attended_pairs, batch.prefix_lens, batch.extend_lens))
                self._core.prefilled(jobs, batch.extend_lens, pairs)
            num_prefills = len(batch.reqs) - num_mixed
            # Prefills of requests with tokens: they were retracted, or preempted without a copy of
            # their KV.
            self.recomputed_tokens += sum(
                num_tokens
                for req, num_tokens in zip(
                    batch.reqs[:num_prefills], batch.extend_lens, strict=False
                )
                if req.output_ids
            )
        else:
            self._core.decoded(len(batch.reqs))
            gone, came, _, _ = self._batch.look(batch.reqs)
            for req in gone:
                self._settle(req.sage.job)
            self._counted.update((req.sage.job, self._num_decodes) for req in came)
            self._num_decodes += 1

    def _settle(self, job: Job) -> None:
        """Count the decode steps that are not counted for a job yet. It takes no part in more."""
        if (counted := self._counted.pop(job, None)) is not None:
            job.served_tokens += self._num_decodes - counted

    def _settle_all(self) -> None:
        for job, counted in self._counted.items():
            job.served_tokens += self._num_decodes - counted
        self._counted = dict.fromkeys(self._counted, self._num_decodes)

    def stepped(self, batch: Batch, result: Any) -> None:
        """Count the tokens that a speculative step gave each request beyond the first, which was
        counted when the step began.

        The work for a request is final when it ends (sage_sched.starvation_bound), although under
        overlap the request is in one more step.
        """
        num_tokens = getattr(result, "accept_lens", None)
        if num_tokens is None or batch.forward_mode.is_extend_without_speculative():
            return
        for req, accepted in zip(batch.reqs, num_tokens.tolist(), strict=False):
            if req.sage.has_ended:
                continue
            self._core.worked([req.sage.job], [accepted - 1])

    def follow(self, waiting: Sequence[Req]) -> None:
        """Note which requests wait."""
        gone, came, start, end = self._queue.look(waiting)
        for req in gone:
            del self.req_of[req.sage.job]
            self.begun.pop(req, None)
        for req in came:
            self.req_of[req.sage.job] = req
            if req.output_ids:
                self.begun[req] = None
                req.sage.job.grow(len(req.output_ids))
        same = self.waiting[len(self.waiting) - (end - start) :]
        first, last = waiting[:start], waiting[end:]
        self.waiting = [req.sage.job for req in first] + same + [req.sage.job for req in last]

    def planned(self, plan: Plan) -> None:
        """Put the waiting jobs in the plan's order, which the queue is about to get."""
        for job, num_before in plan.places.items():
            waits = self.req_of[job].sage.waits
            if waits.num_before is None:
                waits.num_before = num_before
        self._queue.ordered(plan.order)
        self.waiting = in_front(self.waiting, plan.order)

    def running(self, reqs: Sequence[Req]) -> list[Job]:
        """Return the jobs of running requests, at their current age."""
        self._settle_all()
        jobs: list[Job] = [req.sage.job for req in reqs]
        for job, req in zip(jobs, reqs, strict=True):
            job.grow(len(req.output_ids))
        if self._scheduler.page_size > 1:
            for job, req in zip(jobs, reqs, strict=True):
                job.held_tokens = self.held_tokens(req)
        return jobs

    def held_tokens(self, req: Req) -> int:
        """Return the KV tokens that the end of a running request frees."""
        shared_tokens = 0 if self._mode == "decode" else req.cached_tokens
        return max(0, req.kv.kv_allocated_len - shared_tokens)

    def ended(self, req: Req, was_aborted: bool) -> None:
        """Report the last age of a request to the policy."""
        if was_aborted:
            self._core.limits.batches.withdrawn(req.sage.job)
        self._settle(req.sage.job)
        req.sage.job.grow(len(req.output_ids))
        self._core.ended(req.sage.job)

    def stats(self) -> dict[str, Any]:
        """Return counters for /server_info."""
        return {
            "num_predicted": dict(self._num_predicted),
            "num_malformed": self._num_malformed,
            "served_tokens": self._core.served_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }
