"""Implements SRPT by true remaining cost, as a reference. It is only simulated, because no server
knows true lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from sage_sched.fields import MOST
from sage_sched.job import Job
from sage_sched.policy import Policy
from sage_sched.steps import ServerFacts, seconds_on
from sage_sched.view import SchedulerView

# The policy's name in the simulator. No server knows this name.
ORACLE = "srpt-oracle"


@dataclass(frozen=True, slots=True)
class SrptOracleParameters:
    """Settings of srpt-oracle."""

    preempt_margin: Annotated[float, Meta(ge=0, le=MOST)] = 0.5
    """A waiting request preempts a running one if the running one's remaining cost exceeds its own
    by this share."""


class SrptOracle(Policy):
    """Serves the least remaining cost first. Its distributions have one length, the true one. Only
    a simulator hands out such distributions."""

    Parameters = SrptOracleParameters

    def __init__(self, parameters: SrptOracleParameters, server: ServerFacts) -> None:
        super().__init__(parameters, server)
        self._cost = seconds_on(server)

    def rank(self, job: Job) -> None:
        """Compute the job's cost. Raises ValueError unless the job's distribution is the truth."""
        if job.distribution.source != "truth":
            raise ValueError("srpt-oracle needs true lengths, which no server has")
        job.memo = self._spent(job, int(job.distribution.lengths[0]))

    def on_server(self, server: ServerFacts) -> None:
        super().on_server(server)
        self._cost = seconds_on(server)

    def key(self, job: Job, view: SchedulerView) -> float:
        assert isinstance(job.memo, float)
        return job.memo - (self._spent(job, job.generated_tokens) if job.generated_tokens else 0.0)

    def _spent(self, job: Job, output_tokens: int) -> float:
        return float(self._cost(job.input_tokens, output_tokens, job.cached_input_tokens))

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Preempt if the rest of the waiting job, plus the price of the move, costs less than the
        rest of the running job by preempt_margin."""
        margin = 1.0 + self.parameters.preempt_margin
        return bool(margin * (self.key(waiting, view) + price_s) < self.key(running, view))
