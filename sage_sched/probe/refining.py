"""Feeds a probe's scores to the forecasts of running requests, as long as it deserves belief."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.probe.posterior import DUE_INTERVAL_TOKENS, Posterior, Reading

# A probe is believed as long as it foretold this many latest answers better than their prompts did.
NUM_ANSWERS_JUDGED = 512
# The resolution of scores in messages, from the likeliest bin down.
_STEP_NATS = 1 / 16
_LEAST_NATS = -127 * _STEP_NATS


class Refiner(Protocol):
    """Refines the forecasts of jobs by a probe's scores.

    Every tensor-parallel rank has one, and all get the same scores in the same order.
    """

    def wants(self, age_tokens: int) -> bool:
        """Whether it uses scores at this age."""

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        """Revise these jobs (Job.revise) by scores at these ages; returns those that were revised.
        Tell their policy (Policy.on_forecasts) afterwards.

        log_p: ln P(the rest of the answer at that age is in bin), shape (jobs, bins). An age that
        is not above a job's last one is ignored (a token was computed again).
        """

    def gain(self, job: Job) -> float | None:
        """For an answer that has ended at its present age: by how many nats its length was foretold
        better than by the prompt alone, at the age of the last scores. None without scores, or
        without a forecast to compare with."""


def in_steps(log_p: Floats) -> NDArray[np.int8]:
    """Scores for a message, relative to the likeliest bin of their row."""
    down = log_p - log_p.max(axis=-1, keepdims=True)
    steps: NDArray[np.int8] = np.rint(np.maximum(down, _LEAST_NATS) / _STEP_NATS).astype(np.int8)
    return steps


def from_steps(steps: NDArray[np.int8]) -> Floats:
    """ln P, of rows that sum to 1, shape (..., bins)."""
    log_p = steps * _STEP_NATS
    normalized: Floats = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    return normalized


def refiner_of(policy: Policy, reading: Reading | None) -> Refiner | None:
    """The refiner of this policy; None if it takes no scores or there is no probe."""
    if reading is None or not policy.refines_by:
        return None
    refiner: Refiner = (policy.refiner or Posterior)(reading)
    return refiner


class Refining:
    """Feeds scores to a refiner, and judges the probe. Every tensor-parallel rank has one, and all
    get the same scores.

    deserves_belief: the opinion of this rank; rank 0's is told to all (believe).
    """

    def __init__(self, refiner: Refiner, policy: Policy) -> None:
        self.refiner = refiner
        self._policy = policy
        # Weakly, so that it keeps no request alive.
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._gains: deque[float] = deque(maxlen=NUM_ANSWERS_JUDGED)
        self._is_believed = True
        self._why_stopped = ""
        self._num_scores = 0
        self._num_late = 0

    def arrived(self, job: Job) -> None:
        self._jobs[job.arrival] = job

    def scored(self, arrivals: Sequence[int], ages: Sequence[int], log_p: Floats) -> None:
        """Scores for the jobs of these arrivals; log_p: see Refiner.refine. Raises what the policy
        raises."""
        if self._why_stopped:
            return
        jobs = [self._jobs.get(arrival) for arrival in arrivals]
        known = [row for row, job in enumerate(jobs) if job is not None]
        if not known:
            return
        refined = self.refiner.refine(
            [job for job in jobs if job is not None], [ages[row] for row in known], log_p[known]
        )
        self._num_scores += len(refined)
        for job in refined:
            age_tokens = -1 if job.refined is None else job.refined.age_tokens
            self._num_late += job.generated_tokens - age_tokens > DUE_INTERVAL_TOKENS
        if self._is_believed:
            self._policy.on_forecasts(refined)
        else:
            for job in refined:
                job.revise(None)

    def ended(self, job: Job) -> None:
        """Its answer is complete, at its present age."""
        self._jobs.pop(job.arrival, None)
        if (gain := self.refiner.gain(job)) is not None:
            self._gains.append(gain)

    @property
    def deserves_belief(self) -> bool:
        """Whether the last answers were foretold better than by their prompts; true until there are
        enough."""
        return len(self._gains) < NUM_ANSWERS_JUDGED or sum(self._gains) >= 0

    def believe(self, is_believed: bool) -> None:
        """Whether scores count from now on. They are processed in any case, so that a probe can win
        belief back."""
        if is_believed != self._is_believed:
            self._is_believed = is_believed
            if not is_believed:
                self._forget()

    def stop(self, why: str) -> None:
        """Ignore scores from now on, as the model is another."""
        self._why_stopped = why
        self._forget()

    def _forget(self) -> None:
        seen = [job for _, job in sorted(self._jobs.items()) if job.refined is not None]
        for job in seen:
            job.revise(None)
        self._policy.on_forecasts(seen)

    def stats(self) -> dict[str, object]:
        """Counters for /server_info. mean_gain_nats: of the last answers, see deserves_belief.
        num_late: scores that came when the next ones were already due."""
        return {
            "num_scores": self._num_scores,
            "num_late": self._num_late,
            "mean_gain_nats": float(np.mean(self._gains)) if self._gains else 0.0,
            "is_believed": self._is_believed,
            "stopped": self._why_stopped,
        }
