"""Describes the jobs that compete with a newcomer: unfinished ones, and later arrivals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.overload.arrivals import Arrivals
from sage_sched.overload.pace import Pace, Work
from sage_sched.overload.waits import NEVER, Repeated
from sage_sched.overload.work import (
    CAME,
    JOBS,
    KEY,
    LEVEL,
    NUM_BUSY,
    PROMPT,
    STARTS,
    ahead_of,
    works_of,
)
from sage_sched.steps import ServerFacts

# Work takes this much longer than in full batches, because batches are not always full, and because
# the device idles while KV is moved and the host prepares the next step. At 30/s, of which 5/s fit,
# 0.95 of the admitted are good; with 1.15, 0.88.
MARGIN = 1.5
# Arrivals overtake if they bring this share of the work that full batches serve. With 1.15, 0.83 of
# the admitted are good at the rate that just fits; with 0.9, all.
BEYOND = 0.9
# Arrivals give a rate if they span at least this time and are at least this many.
_LEAST_SPAN_S, _LEAST_NUM = 1e-3, 16


@dataclass(frozen=True, slots=True)
class Situation:
    """The columns (sage_sched.overload.work) of unfinished jobs and of the latest admitted
    requests, which are expected to come again.

    table: first the num_unfinished columns of unfinished jobs, then those of arrivals, the latest
        first.
    in_place: the work of the unfinished jobs while they keep their places.
    starts: the time for which later arrivals stop decoding to start ahead of the order.
    parts, span_s: the periods in which more work has come than the server serves, the shortest
        first. Each begins where the next one's part of the table does, and lasts until now. Shape
        (periods,).
    """

    table: Floats
    num_unfinished: int
    in_place: Work
    pace: Pace
    starts: Repeated
    parts: NDArray[np.int64]
    span_s: Floats

    @classmethod
    def of(
        cls,
        unfinished: Floats,
        in_place: Work,
        offered: Arrivals,
        admitted: Arrivals,
        server: ServerFacts,
        together: float,
        now_s: float,
        *,
        own: Work,
        starts_early: bool,
    ) -> Situation:
        """unfinished: the columns of unfinished jobs. together: see Pace.of. own: the work of the
        newcomer for which the situation is looked at."""
        places = admitted.periods()
        span_s = np.maximum(now_s - admitted.table[CAME].take(places), _LEAST_SPAN_S)
        rate = 0.0
        if starts_early and places.size:
            counts = len(admitted) - places
            number = max(1, np.count_nonzero(counts >= _LEAST_NUM))
            rate = float(np.maximum.reduce(counts[:number] / span_s[:number]))
        pace, starts = Pace.of(in_place + own, server, together, rate), NEVER
        if starts_early and places.size:
            early = admitted.since(places)
            # No faster than the server serves them.
            starts_s = pace.starts_s(early)
            starts = Repeated(starts_s, np.maximum(span_s, starts_s + pace.steps_s(early)))
        beyond = np.flatnonzero(_is_beyond(pace, offered, admitted.numbers[places], now_s))[::-1]
        number = unfinished.shape[1]
        if not beyond.size:
            return cls(unfinished, number, in_place, pace, starts, beyond, span_s[beyond])
        latest = admitted.table[:, places[beyond[-1]] :][:, ::-1]
        table = np.concatenate((unfinished, latest), axis=1)
        # An arrival with the newcomer's key does not overtake it.
        np.nextafter(table[KEY, number:], np.inf, out=table[KEY, number:])
        parts = np.append(number, number + len(admitted) - places[beyond[:-1]])
        return cls(table, number, in_place, pace, starts, parts, span_s[beyond])

    def ahead(self, place: Floats) -> tuple[Work, Repeated]:
        """Return the work before a newcomer with this column, and the later arrivals that overtake
        it."""
        works = works_of(self.table, *ahead_of(place, self.table))
        before = Work(*np.add.reduce(works[:, : self.num_unfinished], axis=1).tolist())
        if not self.parts.size:
            return before, NEVER
        parts = np.add.reduceat(works[:NUM_BUSY], self.parts, axis=1)
        later = Work(*np.add.accumulate(parts, axis=1))
        return before, Repeated(MARGIN * self.pace.busy_s(later), self.span_s)

    def fresh(self, place: Floats, longest_s: float) -> Work:
        """Return the prefills of the jobs that may start with a newcomer: none of a worse level, or
        whose prompt takes longest_s or more."""
        table = self.table[:, : self.num_unfinished]
        may = table[PROMPT] < longest_s
        may &= table[LEVEL] <= place[LEVEL]
        if np.logical_and.reduce(may):
            return self.in_place
        starts = table[STARTS] * (may * table[JOBS])
        return Work(*np.add.reduce(starts, axis=1).tolist())


def _is_beyond(
    pace: Pace, offered: Arrivals, numbers: NDArray[np.int64], now_s: float
) -> NDArray[np.bool_]:
    """Return, for the time since each of these arrivals, whether more work has come than the server
    serves, refused or not. Of n arrivals, twice the root of n may be chance."""
    if not numbers.size:
        return np.zeros(0, bool)
    places = np.maximum(numbers - offered.numbers[0], 0)
    sure = 1 - 2 / np.sqrt(len(offered) - places)
    busy_s = pace.busy_s(offered.since(places)) * sure
    is_beyond: NDArray[np.bool_] = busy_s >= BEYOND * (now_s - offered.table[CAME].take(places))
    return is_beyond
