"""What is known of an answer's length once the model has begun it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sage_sched.job import Job

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Refined:
    """The distribution of an answer's length at one age, by what was seen of the answer until then.

    age_tokens: the age. lengths: of the whole answer, not decreasing, shape (n,). weights: shape
    (n,), summing to 1; 0 where the length does not exceed the age.
    """

    age_tokens: int
    lengths: Floats
    weights: Floats

    def mean_left_tokens(self) -> float:
        """Of what is still to come, from age_tokens on."""
        return float(self.lengths @ self.weights) - self.age_tokens


class Refiner(Protocol):
    """Makes of a probe's scores what it refines the forecasts of jobs to.

    Every tensor-parallel rank has one, and all are told the same in the same order.
    """

    def wants(self, age_tokens: int) -> bool:
        """Whether scores at this age are of use."""
        ...

    def refine(self, jobs: Sequence[Job], ages: Sequence[int], log_p: Floats) -> list[Job]:
        """Revise these jobs (Job.revise) by scores at these ages; those that were. Tell their
        policy (Policy.on_forecasts) afterwards.

        log_p: ln P(what is left of the answer at that age is in bin), shape (jobs, bins). An age
        that is not above the last one of a job's is no news (a token computed again), and ignored.
        """
        ...

    def gain(self, job: Job) -> float | None:
        """Of an answer that has ended at its present age: by how much better, in nats, its length
        was foretold than by the prompt alone, given the age of the last scores. None if there were
        none, or if there is nothing to compare with."""
        ...
