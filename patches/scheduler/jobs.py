"""A Job for every request of one scheduler, and counts of what arrived and was served."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from patches.carrier import CLOCK, EXPLAIN, EXPLANATION, came_at_s, decode, decode_hints
from patches.engine_types import Batch, Req
from patches.scheduler.request import Explanation, RequestState, Waits
from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Job
from sage_sched.limits import Limits
from sage_sched.policy import Policy
from sage_sched.steps import attended_pairs

logger = logging.getLogger(__name__)

_ONE_TOKEN = LengthDistribution.from_samples([1], "truth")


class Failures:
    """Errors of a policy, which cost a pass its order and nothing else. The first is logged."""

    def __init__(self) -> None:
        self.num_failures = 0

    def count(self, task: str) -> None:
        """Call it where the error is caught. task: what the policy could not do."""
        self.num_failures += 1
        if self.num_failures == 1:
            logger.exception(
                "the policy could not %s; first come, first served instead. "
                "Further failures are only counted (num_policy_errors).",
                task,
            )


class Jobs:
    """The jobs of one scheduler. All ranks see the same requests in the same order and count the
    same tokens. now_s: rank 0's clock as last told, for policies that use a clock."""

    def __init__(
        self, policy: Policy, limits: Limits, failures: Failures, mode: str = "null"
    ) -> None:
        """mode: SGLang's --disaggregation-mode."""
        self._policy, self._limits = policy, limits
        self._mode = mode
        self._failures = failures
        self.served_tokens = 0
        self.recomputed_tokens = 0
        self.num_arrivals = 0
        self.now_s = 0.0
        self._undated: list[tuple[Job, Req]] = []
        self._num_ranked: Counter[str] = Counter()
        self._num_unranked = 0
        self._num_malformed = 0

    def arrived(self, req: Req, level: int = 0) -> None:
        """Put a Job on a new request."""
        job = Job(
            arrival=self.num_arrivals,
            input_tokens=len(req.origin_input_ids),
            max_new_tokens=max(1, req.sampling_params.max_new_tokens),
            distribution=self._carried(decode, req, None),
            served_at_arrival_tokens=self.served_tokens,
            arrival_s=self.now_s,
            hints=self._carried(decode_hints, req, NO_HINTS),
            has_fixed_length=req.sampling_params.ignore_eos,
            keeps_memory=req.session is not None,
            prompt=hash(tuple(req.origin_input_ids)),
            level=level,
            ranked_at=self._policy.revision,
        )
        if self._mode == "prefill":  # of its answer no more is made here
            job.max_new_tokens, job.distribution = 1, _ONE_TOKEN
        elif self._mode == "decode":  # its prompt is prefilled elsewhere
            job.cached_tokens = job.input_tokens
        self.num_arrivals += 1
        self._limits.arrived(job)
        if self._needs_clock:
            self._undated.append((job, req))
        self._rank(job)
        # It has waited for its prediction already.
        came_s = came_at_s(req.sampling_params.custom_params, time.monotonic())
        req.sage = RequestState(job, Waits(came_s, since_s=came_s))
        if EXPLAIN.keys() <= (req.sampling_params.custom_params or {}).keys():
            req.customized_info = {EXPLANATION: Explanation(req)}
        if job.is_ranked:
            self._num_ranked["none" if job.distribution is None else job.distribution.source] += 1
        else:
            self._num_unranked += 1

    @property
    def _needs_clock(self) -> bool:
        return self._policy.uses_clock or self._limits.needs_clock

    def _rank(self, job: Job) -> None:
        try:
            job.is_ranked = self._policy.on_arrival(job)
        except Exception:
            job.is_ranked = False
            self._failures.count("rank a request")

    def follow(
        self, policy: Policy, limits: Limits, reqs: Sequence[Req], now_s: float, clock: str
    ) -> None:
        """From now on go by another policy and its limits, which meet the unfinished requests in
        order of arrival. now_s: on the clock of the ticks, or near it: the next tick dates the
        requests anew. clock: its name, as the ranks of several hosts must date alike."""
        self._policy, self._limits = policy, limits
        self._undated.clear()
        self.now_s = max(self.now_s, now_s)
        for req in sorted(reqs, key=lambda req: req.sage.job.arrival):
            job = req.sage.job
            job.arrival_s = came_at_s(req.sampling_params.custom_params, self.now_s, clock)
            job.forget_policy()
            limits.arrived(job)
            self._rank(job)
            if self._needs_clock:
                self._undated.append((job, req))

    def _carried(self, decoded: Any, req: Req, otherwise: Any) -> Any:
        try:
            return decoded(req.sampling_params.custom_params)
        except ValueError:
            self._num_malformed += 1
            return otherwise

    def ticked(self, now_s: float, clock: str = CLOCK) -> None:
        """Rank 0's clock was broadcast. It comes after the requests of the same broadcast. clock:
        its name (patches.carrier)."""
        self.now_s = now_s
        for job, req in self._undated:
            job.arrival_s = came_at_s(req.sampling_params.custom_params, now_s, clock)
        self._undated.clear()

    def about_to_run(self, batch: Batch) -> None:
        """Count the tokens that a batch computes, prefill or decode."""
        # A batch that goes on to decode keeps the extend_num_tokens of its prefill.
        if batch.forward_mode.is_extend_without_speculative():
            self.served_tokens += batch.extend_num_tokens
            # All of them, where SGLang decodes by a step like a prefill beside a peer's prefill.
            num_mixed = len(batch.decoding_reqs or [])
            num_prefills = len(batch.reqs) - num_mixed
            if num_mixed:
                self._limits.gap.decoded()
            else:
                pairs = sum(map(attended_pairs, batch.prefix_lens, batch.extend_lens))
                self._limits.gap.prefilled(num_prefills, batch.extend_num_tokens, pairs)
            rows = zip(batch.reqs, batch.extend_lens, strict=True)
            for place, (req, num_tokens) in enumerate(rows):
                req.sage.job.served_tokens += num_tokens
                # A prefill of a begun answer: it was retracted, or left its KV behind.
                if req.output_ids and place < num_prefills:
                    self.recomputed_tokens += num_tokens
                    req.sage.waits.was_retracted(req.time_stats.wait_queue_entry_time)
                req.sage.waits.ends()
        else:
            self._limits.gap.decoded()
            self.served_tokens += len(batch.reqs)
            for req in batch.reqs:
                req.sage.job.served_tokens += 1

    def accepted(self, batch: Batch, num_tokens: Any) -> None:
        """Count what a speculative step gave each request beyond the one token that was counted
        when it began. num_tokens: of each, at least 1; None if it was no such step. The work for a
        request is final at its end (sage_sched.fairness), though under overlap it is in one more
        step."""
        if num_tokens is None or batch.forward_mode.is_extend_without_speculative():
            return
        for req, accepted in zip(batch.reqs, num_tokens.tolist(), strict=False):
            if req.sage.has_ended:
                continue
            self.served_tokens += accepted - 1
            req.sage.job.served_tokens += accepted - 1

    def running(self, reqs: Sequence[Req]) -> list[Job]:
        """The jobs of running requests, at their present age."""
        jobs = []
        for req in reqs:
            job = req.sage.job
            job.grow(len(req.output_ids))
            # An estimate of what its end gives back: others may share what it found in the radix
            # tree at its start.
            if self._mode != "decode":
                job.cached_tokens = req.cached_tokens
            job.held_tokens = self.held_tokens(req)
            jobs.append(job)
        return jobs

    def held_tokens(self, req: Req) -> int:
        """KV that the end of a running request frees."""
        shared_tokens = 0 if self._mode == "decode" else req.cached_tokens
        return max(0, req.kv.kv_allocated_len - shared_tokens)

    def ended(self, reqs: Sequence[Req]) -> Iterator[Req]:
        """Those that have finished, each once, though under overlap it is in two batches."""
        for req in reqs:
            if req.finished() and not req.sage.has_ended:
                self.gone(req)
                yield req

    def gone(self, req: Req) -> None:
        """A request has ended, or was aborted in the queue."""
        req.sage.has_ended = True
        req.sage.job.grow(len(req.output_ids))
        self._limits.ended(req.sage.job, self.now_s)
        try:
            self._policy.on_end(req.sage.job, self.now_s)
        except Exception:
            self._failures.count("take in an end")

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info."""
        return {
            "num_ranked": dict(self._num_ranked),
            "num_unranked": self._num_unranked,
            "num_malformed": self._num_malformed,
            "served_tokens": self.served_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }
