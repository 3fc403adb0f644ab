"""What requests an experiment's loads are made of."""

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
    """What requests are drawn for. Nothing is reported on those of the other two."""

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
        """One request (or session) for each arrival, ascending times in seconds, shape (number,).

        The same for all arms but for what is foreseen and said of them. cap: their max_new_tokens.
        """

    def for_servers(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        """Return what real servers are asked; fewer than arrivals if prompts would come again."""
        return self.requests(arm, arrivals_s, seed, cap, purpose)

    def all_answers(self) -> LengthDistribution:
        """What servers are to foresee of every answer, where no text tells its length."""
        raise NotImplementedError

    def slo(self) -> SloConfig:
        """What is promised on servers; bodies may say priorities."""
        return SloConfig(trust="body")

    def priority_of(self, request: SimRequest) -> int:
        """What a request's body says, so that servers know of it what the simulator does."""
        return DEFAULT_URGENCY - request.hints.urgency
