"""Remembers the latest arrivals, from which the next arrivals are predicted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats
from sage_sched.overload.pace import Work
from sage_sched.overload.work import NUM_BUSY, NUM_ROWS, TO_END, revise
from sage_sched.steps import StepTime

# The number of remembered arrivals, and of the periods that are looked at.
_MOST, _MOST_PERIODS = 512, 64


class Arrivals:
    """Keeps the columns (sage_sched.overload.work) of the latest arrivals."""

    def __init__(self) -> None:
        self._table: Floats = np.zeros((NUM_ROWS, 2 * _MOST))
        self._numbers = np.zeros(2 * _MOST, np.int64)
        # The work of all arrivals before each of them, and of all until now.
        self._before: Floats = np.zeros((NUM_BUSY, 2 * _MOST))
        self._work: Floats = np.zeros(NUM_BUSY)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def add(self, column: Floats, number: int) -> None:
        """number: its number among all arrivals."""
        if self._end == 2 * _MOST:
            self._table[:, :_MOST] = self._table[:, _MOST:]
            self._numbers[:_MOST] = self._numbers[_MOST:]
            self._before[:, :_MOST] = self._before[:, _MOST:]
            self._first, self._end = self._first - _MOST, _MOST
        self._table[:, self._end], self._numbers[self._end] = column, number
        self._before[:, self._end] = self._work
        self._work = self._work + column[TO_END]
        self._end += 1
        self._first = max(self._first, self._end - _MOST)

    def revise(self, rise: float, step_time: StepTime) -> None:
        """Make columns fit other step times. rise: by how much keys have risen."""
        revise(self.table, rise, step_time)
        works = np.add.accumulate(self.table[TO_END], axis=1)
        self._before[:, self._first : self._end] = works - self.table[TO_END]
        self._work = works[:, -1] if len(self) else np.zeros(NUM_BUSY)

    def clear(self) -> None:
        """Forget all arrivals, because the server is idle."""
        self._first = self._end = 0
        self._work = np.zeros(NUM_BUSY)

    @property
    def table(self) -> Floats:
        """The columns, in order of arrival."""
        return self._table[:, self._first : self._end]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Their numbers among all arrivals, ascending."""
        return self._numbers[self._first : self._end]

    def periods(self) -> NDArray[np.int64]:
        """Return the places of the arrivals with which periods begin. Each lasts until now."""
        stride = -(-len(self) // _MOST_PERIODS) or 1
        return np.arange(len(self) % stride, len(self), stride)

    def since(self, places: NDArray[np.int64]) -> Work:
        """Return the work of the arrivals in each period, in the fields that Pace.busy_s needs."""
        before = self._before[:, self._first : self._end].take(places, axis=1)
        return Work(*(self._work[:, None] - before))
