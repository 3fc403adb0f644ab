"""Defines the interface of sources, which make the requests of an experiment's loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.policies.arm import Arm
from bench.simulator.request import SimRequest
from bench.workloads.prompts import Workload
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY
from sage_sched.slo import SloConfig


class Purpose(StrEnum):
    """The purpose of drawn requests. Reports use none of the requests of the other purposes."""

    REPORT = "report"
    TUNING = "tuning"
    CAPACITY = "capacity"


class Draw(NamedTuple):
    """The requests to draw.

    arm: its policy and settings; it changes only predictions and hints.
    arrivals_s: when each request (or session) arrives, in seconds, ascending, shape (number,).
    cap: max_new_tokens of all.
    """

    arm: Arm
    arrivals_s: NDArray[np.float64]
    seed: int
    cap: int
    purpose: Purpose = Purpose.REPORT

    @property
    def number(self) -> int:
        """The number of requests (or sessions)."""
        return len(self.arrivals_s)


class Source(ABC):
    """Makes requests of one kind.

    num_for_capacity: the number of arrivals that measures the capacity of an engine.
    workload: its prompts, for real servers; None if it has lengths alone.
    """

    num_for_capacity: int = 2500
    workload: Workload | None = None

    @abstractmethod
    def requests(self, draw: Draw) -> list[SimRequest]:
        """Return one request (or session) for each arrival, the same for all arms except
        predictions and hints."""

    def for_servers(self, draw: Draw) -> list[SimRequest]:
        """Return the requests for real servers; fewer than arrivals if prompts would be
        repeated."""
        return self.requests(draw)

    def all_answers(self) -> LengthDistribution:
        """Return one prediction for every answer, if there are no texts to predict from."""
        raise NotImplementedError

    def slo(self) -> SloConfig:
        """Return the servers' SLOs. Request bodies may give priorities."""
        return SloConfig(trust="body")

    def priority_of(self, request: SimRequest) -> int:
        """Return the priority in a request's body, which tells servers as much as the simulator
        knows."""
        return DEFAULT_URGENCY - request.hints.urgency
