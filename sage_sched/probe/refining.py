"""Feeds a probe's scores to the predictions of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.policy import Policy

# Edges of the bins: in bin b more than edges[b] and at most edges[b + 1] tokens are left. Shape
# (bins + 1,), from 0.
Edges = NDArray[np.int64]
# The resolution of scores in messages, from the likeliest bin down.
_STEP_NATS = 1 / 16
_LEAST_NATS = -127 * _STEP_NATS


class Refiner(Protocol):
    """Refines the predictions of jobs by a probe's scores.

    Every tensor-parallel rank has one, and all get the same scores in the same order.
    """

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        """Revise these jobs (Job.revise) by scores at these ages; return the revised ones. Call
        Policy.on_predictions for them afterwards.

        log_p: ln P(the rest of the answer at that age is in bin), shape (jobs, bins). An age that
            is not above a job's last one is ignored (a token was computed again).
        """


def in_steps(log_p: Floats) -> NDArray[np.int8]:
    """Encode scores for a message, relative to the likeliest bin of their row."""
    down = log_p - log_p.max(axis=-1, keepdims=True)
    steps: NDArray[np.int8] = np.rint(np.maximum(down, _LEAST_NATS) / _STEP_NATS).astype(np.int8)
    return steps


def from_steps(steps: NDArray[np.int8]) -> Floats:
    """Return ln P, shape (..., bins); each row of P sums to 1."""
    log_p = steps * _STEP_NATS
    normalized: Floats = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    return normalized


class Refining:
    """Feeds scores to a refiner. Every tensor-parallel rank has one and gets the same scores."""

    def __init__(self, refiner: Refiner, policy: Policy) -> None:
        self._refiner = refiner
        self._policy = policy
        # Weak references, so that it keeps no request alive.
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._why_stopped = ""
        self._num_scores = 0

    def arrived(self, job: Job) -> None:
        self._jobs[job.arrival] = job

    def scored(self, arrivals: Sequence[int], ages: Sequence[int], log_p: Floats) -> None:
        """Pass scores to the jobs of these arrivals; log_p: see Refiner.refine. Passes on the
        policy's errors."""
        if self._why_stopped:
            return
        jobs = [self._jobs.get(arrival) for arrival in arrivals]
        known = [row for row, job in enumerate(jobs) if job is not None]
        if not known:
            return
        refined = self._refiner.refine(
            [job for job in jobs if job is not None], [ages[row] for row in known], log_p[known]
        )
        self._num_scores += len(refined)
        self._policy.on_predictions(refined)

    def ended(self, job: Job) -> None:
        """Note that the job's answer is complete."""
        self._jobs.pop(job.arrival, None)

    def stop(self, why: str) -> None:
        """Ignore scores from now on, because the model has changed."""
        self._why_stopped = why
        seen = [job for _, job in sorted(self._jobs.items()) if job.refined is not None]
        for job in seen:
            job.revise(None)
        self._policy.on_predictions(seen)

    def stats(self) -> dict[str, object]:
        """Return the counters for /server_info."""
        return {"num_scores": self._num_scores, "stopped": self._why_stopped}
