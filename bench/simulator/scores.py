"""What a probe says of answers as they grow, played back from a recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.probe import Reading, Refining, refiner_of


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of one answer. ages: at which it was scored, rising, shape (scores,). log_p: ln P(the rest is
    in bin), shape (scores, bins). reading: of the probe."""

    ages: NDArray[np.int64]
    log_p: Floats
    reading: Reading


class Playback:
    """Tells a policy of scores, as a server does after each step (patches/probe/scores.py). A
    server also judges the probe; this is left out."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._refining: Refining | None = None
        self._told: dict[int, int] = {}  # how many scores, by arrival

    def tell(self, running: Iterable[tuple[Job, Scores]]) -> None:
        """All scores of ages below the present ones that were not told yet."""
        arrivals, ages, rows = [], [], []
        for job, scores in running:
            if self._refining is None:
                if (refiner := refiner_of(self._policy, scores.reading)) is None:
                    return
                self._refining = Refining(refiner, self._policy)
            if job.arrival not in self._told:
                self._refining.arrived(job)
            first = self._told.get(job.arrival, 0)
            end = int(np.searchsorted(scores.ages, job.generated_tokens))
            for row in range(first, end):
                if self._refining.refiner.wants(age := int(scores.ages[row])):
                    arrivals.append(job.arrival)
                    ages.append(age)
                    rows.append(scores.log_p[row])
            self._told[job.arrival] = max(first, end)
        if self._refining is not None and rows:
            self._refining.scored(arrivals, ages, np.array(rows))
