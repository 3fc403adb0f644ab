"""A bound for level 1: what it would wait if nothing stood in its way but the batch's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig
from sage_sched.job import Job
from sage_sched.urgency.policy import Urgency, UrgencyParameters
from sage_sched.view import SchedulerView


class Ideal(Urgency):
    """urgency with credit without end for level 1, to which all others yield at once."""

    def level(self, job: Job) -> int:
        return job.hints.urgency

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        return self.level(waiting) == 1 < self.level(running)


def simulate_ideal(engine: Engine, requests: Sequence[SimRequest], decode_share: float) -> Result:
    """Under Ideal, on an engine on which to yield and to come back takes no time."""
    parameters = UrgencyParameters(decode_share=decode_share)
    policy = Ideal(parameters, engine.server_facts())
    free = replace(engine, swap_token_s=0.0)
    return simulate(free, policy, SageConfig(), requests, Options(preempt=True, max_yields=1_000))
