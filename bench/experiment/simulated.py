"""Serves an arm's requests in the simulator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engines.baseline import Saturation, sustained
from bench.experiment.spec import Load
from bench.policies import deadline_rivals, programs, variants
from bench.policies.arm import Arm
from bench.policies.rival import by_arrival
from bench.policies.routers import router_named
from bench.simulator.apart import Apart
from bench.simulator.cluster import Cluster
from bench.simulator.request import SimRequest
from bench.simulator.result import Result
from bench.simulator.run import simulate
from bench.simulator.state import Options
from bench.workloads.arrivals import (
    RECORDED,
    RECORDING,
    RUSH,
    arrivals_of,
    num_requests_of,
    requests_per_s,
    rush_arrivals,
    trace_arrivals,
)
from bench.workloads.datasets import given
from bench.workloads.source import Draw, Purpose, Source
from bench.workloads.sources import source_of
from sage_sched.policy import Policy
from sage_sched.slo import Deadlines

# The longest wait of a request for its prediction on a server.
PREDICTION_DELAY_S = 0.002
_CAPACITY_SEED = 1
_RIVALS: dict[str, type[Policy]] = {
    **deadline_rivals.RIVALS,
    **variants.PARTS,
    **programs.RIVALS,
}


@dataclass(frozen=True)
class Loaded:
    """A load, and the source of its requests.

    alike: another load of the same mix.
    measure: measures the capacity of one engine, if the simulator should not.
    """

    load: Load
    data: Path | None
    alike: Loaded | None = None
    measure: Callable[[], Saturation] | None = None

    @functools.cached_property
    def source(self) -> Source:
        """The source of the requests. Raises WorkloadError, ConfigError."""
        if self.alike is not None:
            return self.alike.source
        return source_of(self.load.workload, self.load.engine_of(Arm(policy="fcfs")), self.data)

    @functools.cached_property
    def saturated(self) -> Saturation:
        """The rate that one engine sustains under capacity_by."""
        if self.alike is not None and self.alike.load.capacity_by == self.load.capacity_by:
            return self.alike.saturated
        if self.measure is not None:
            return self.measure()
        arm, cap = Arm(policy=by_arrival(self.load.capacity_by)), self.load.max_new_tokens

        def serve(arrivals_s: NDArray[np.float64]) -> Result:
            draw = Draw(arm, arrivals_s, _CAPACITY_SEED, cap, Purpose.CAPACITY)
            return served(self.load, arm, self.source.requests(draw), one_node=True)

        return sustained(serve, lambda _: self.source.num_for_capacity)

    @functools.cached_property
    def rate_per_s(self) -> float:
        """Requests (or sessions) per second, on all nodes."""
        if not self.load.rate.endswith("x"):
            return requests_per_s(self.load.rate, 1.0)
        return requests_per_s(self.load.rate, self.saturated.capacity * self.load.nodes)

    @property
    def recording(self) -> Path:
        """The file of recorded arrival times. Raises WorkloadError."""
        return given(self.data, "the trace of recorded arrivals", "", RECORDED) / RECORDING

    def arrivals_s(self, seed: int) -> NDArray[np.float64]:
        """Return the times at which requests come."""
        load = self.load
        if load.arrivals == RUSH:
            return rush_arrivals(self.rate_per_s, self.saturated.capacity * load.nodes, seed)
        number = load.num_requests
        if number is None:
            service_s = self.saturated.service_s if load.arrivals == "sustained" else 0.0
            number = num_requests_of(load.arrivals, self.rate_per_s, service_s)
        if load.arrivals == RECORDED:
            return trace_arrivals(self.recording, number, seed) / self.rate_per_s
        return arrivals_of(load.arrivals, number, seed) / self.rate_per_s

    def requests(self, arm: Arm, seed: int, purpose: Purpose = Purpose.REPORT) -> list[SimRequest]:
        """Return the requests of a seed, the same for all arms except predictions and hints."""
        draw = Draw(arm, self.arrivals_s(seed), seed, self.load.max_new_tokens, purpose)
        return self.source.requests(draw)


def served(
    load: Load, arm: Arm, requests: Sequence[SimRequest], seed: int = 0, *, one_node: bool = False
) -> Result:
    """Simulate an arm's requests. Raises ValueError if the policy is unknown."""
    engine = load.engine_of(arm)
    due = Deadlines(load.ttft_slo_ms / 1e3, load.tpot_slo_ms / 1e3)
    options = Options(preempt=arm.preempt, prediction_delay_s=PREDICTION_DELAY_S, due=due)
    num_nodes = 1 if one_node else load.nodes
    if load.apart or num_nodes > 1:
        kind = Apart if load.apart else Cluster
        nodes = kind(engine, arm.policy, arm.config, requests, options, num_nodes)
        return nodes.serve(router_named(arm.dispatch, seed))
    rival = _RIVALS.get(arm.policy)
    policy = rival(rival.Parameters(), engine.server_facts()) if rival else arm.policy
    return simulate(engine, policy, arm.config, requests, options)
