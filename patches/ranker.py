"""One scheduler's view of its queue as the policy's jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from patches.carrier import decode
from sage_sched.config import PolicyConfig
from sage_sched.job import Job
from sage_sched.policy import Policy, policy_named
from sage_sched.queue import ranked_order
from sage_sched.step_time import ServerFacts

logger = logging.getLogger(__name__)

_by_place = attrgetter("sage_place")
_by_arrival = attrgetter("sage_arrival")


class Ranker:
    """Keeps a Job on every request and sorts the waiting queue by the policy.

    Every tensor-parallel rank has one; all see the same requests in the same order and count the
    same tokens, so all sort alike. The clock is read for the counters only.
    """

    def __init__(self, name: str, config: PolicyConfig, server: ServerFacts) -> None:
        self.policy: Policy = policy_named(name)(config, server)
        self.bucket_tokens = config.bucket_tokens
        self.served_tokens = 0
        self.num_arrivals = 0
        self._ranked_by_source: dict[str, int] = {}
        self._num_unranked = 0
        self._num_garbled = 0
        self._num_policy_errors = 0
        self._num_passes = 0
        self._pass_seconds = 0.0
        self._longest_pass_seconds = 0.0

    def arrived(self, req: Any) -> None:
        """Put a Job on a new request, or None where the policy cannot rank it."""
        req.sage_arrival = self.num_arrivals
        self.num_arrivals += 1
        req.sage_place = (0.0, req.sage_arrival, -1)
        req.sage_job = self._admitted(req)
        if req.sage_job is None:
            self._num_unranked += 1
        else:
            lengths = req.sage_job.distribution
            source = lengths.source if lengths is not None else "none"
            self._ranked_by_source[source] = self._ranked_by_source.get(source, 0) + 1

    def _admitted(self, req: Any) -> Job | None:
        try:
            distribution = decode(req.sampling_params.custom_params)
        except ValueError:
            self._num_garbled += 1
            distribution = None
        job = Job(
            arrival=req.sage_arrival,
            input_tokens=len(req.origin_input_ids),
            max_new_tokens=max(1, req.sampling_params.max_new_tokens),
            distribution=distribution,
            served_at_arrival_tokens=self.served_tokens,
        )
        try:
            return job if self.policy.admit(job) else None
        except Exception:
            self.failed("admit a request")
            return None

    def served(self, num_tokens: int) -> None:
        """Count tokens that the server is about to work off, prefill or decode."""
        self.served_tokens += num_tokens

    def sort(self, queue: list[Any]) -> None:
        """Sort a waiting queue in place; by arrival in a pass in which the policy fails.

        What the policy cannot rank waits for as many others as came before it. The order depends
        on who is in the queue, and not on how the queue was ordered before: that may differ
        between ranks.
        """
        started = time.perf_counter()
        if self.policy.moves or not self._sort_by_places(queue):
            queue.sort(key=_by_arrival)
            order = self._order(queue)
            if order is not None:
                queue[:] = [queue[position] for position in order]
        spent = time.perf_counter() - started
        self._num_passes += 1
        self._pass_seconds += spent
        self._longest_pass_seconds = max(self._longest_pass_seconds, spent)

    def _sort_by_places(self, queue: list[Any]) -> bool:
        """Sort by (key, arrival, age), computed once an age, as a queue of a thousand has to be
        sorted in every pass; False where that cannot be: _order will tell."""
        try:
            stale = [req for req in queue if req.sage_place[2] != len(req.output_ids)]
            for req in stale:
                job = req.sage_job
                job.generated_tokens = len(req.output_ids)
                key = self.policy.key(job, self.served_tokens)
                req.sage_place = (key, job.arrival, job.generated_tokens)
        except Exception:
            return False
        queue.sort(key=_by_place)
        return True

    def kept_order(self, reqs: Sequence[Any], default: Sequence[int]) -> list[int]:
        """The positions of running requests, from the first to keep to the first to retract.

        default: SGLang's own order of them. What the policy cannot rank has its place in that one,
        and where the policy fails, all have.
        """
        order = self._order([reqs[position] for position in default])
        return list(default) if order is None else [default[place] for place in order]

    def _order(self, reqs: Sequence[Any]) -> list[int] | None:
        """Their positions by the policy, at their present age; None where it fails."""
        jobs = [getattr(req, "sage_job", None) for req in reqs]
        for req, job in zip(reqs, jobs, strict=True):
            if job is not None:
                job.generated_tokens = len(req.output_ids)
        try:
            return ranked_order(jobs, self.policy, self.served_tokens)
        except Exception:
            self.failed("rank the queue")
            return None

    def failed(self, task: str) -> None:
        """Count an error of the policy; call it where it was caught."""
        self._num_policy_errors += 1
        if self._num_policy_errors == 1:
            logger.exception(
                "the policy could not %s; first come, first served instead. "
                "Further failures are only counted (num_policy_errors).",
                task,
            )

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info."""
        return {
            "num_ranked": dict(self._ranked_by_source),
            "num_unranked": self._num_unranked,
            "num_garbled": self._num_garbled,
            "num_policy_errors": self._num_policy_errors,
            "served_tokens": self.served_tokens,
            "num_passes": self._num_passes,
            "mean_pass_ms": 1e3 * self._pass_seconds / max(1, self._num_passes),
            "longest_pass_ms": 1e3 * self._longest_pass_seconds,
        }
