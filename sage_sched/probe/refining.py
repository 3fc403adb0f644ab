"""The interface of refiners, and the encoding of a probe's scores in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job

# Edges of the bins, from 0, shape (bins + 1,). In bin b, more than edges[b] and at most
# edges[b + 1] tokens are left.
Edges = NDArray[np.int64]
# The resolution of scores in messages, which count down from the likeliest bin.
_STEP_NATS = 1 / 16
_LEAST_NATS = -127 * _STEP_NATS


class Refiner(Protocol):
    """Refines the predictions of jobs with a probe's scores.

    Every tensor-parallel rank has a refiner, and all get the same scores in the same order.
    """

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        """Revise these jobs (Job.revise) with scores at these ages, and return the revised ones.
        The caller then calls Scheduler.refined.

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
