"""Sources of the requests of an experiment's loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from bench.policies.arm import Arm
from bench.simulator.request import SimRequest
from bench.workloads.prompts import Workload
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY
from sage_sched.slo import SloConfig


class Purpose(StrEnum):
    """The purpose of drawn requests. Reports use none of the other two."""

    REPORT = "report"
    TUNING = "tuning"
    CAPACITY = "capacity"


class Source(ABC):
    """Requests of one kind.

    num_for_capacity: how many arrivals tell what an engine sustains of them.
    workload: its prompts, which real servers can be asked; None if it has lengths alone.
    """

    num_for_capacity: int = 2500
    workload: Workload | None = None

    @abstractmethod
    def requests(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        """Return one request (or session) for each arrival, ascending times in seconds, shape
        (number,).

        The same for all arms but for predictions and hints. cap: their max_new_tokens.
        """

    def for_servers(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        """Return the requests for real servers; fewer than arrivals if prompts would come again."""
        return self.requests(arm, arrivals_s, seed, cap, purpose)

    def all_answers(self) -> LengthDistribution:
        """Return the prediction of every answer, if no text tells its length."""
        raise NotImplementedError

    def slo(self) -> SloConfig:
        """Return the SLOs of servers; bodies may say priorities."""
        return SloConfig(trust="body")

    def priority_of(self, request: SimRequest) -> int:
        """Return the priority in a request's body, by which servers know as much as the
        simulator."""
        return DEFAULT_URGENCY - request.hints.urgency
