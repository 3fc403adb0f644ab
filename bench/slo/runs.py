"""What is simulated: requests of two classes, under each policy, at rates around the capacity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.baseline import Saturation
from bench.engines.simulator.presets import H800_QWEN3_32B, Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result, Served
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.slo.lengths import Lengths
from bench.slo.rivals import RIVALS, rival
from bench.workloads.arrivals import arrivals_of
from sage_sched.config import SageConfig
from sage_sched.job import Hints

# By a policy.
Serve = Callable[[str, Sequence[SimRequest]], Served]

CAP_TOKENS = 2048
STOCK = ("fcfs", "lpm", "hrrn", "shortest-prefill-first")
OURS = ("proserve", "proserve-expected")
ABLATIONS = ("proserve-deadline-only", "proserve-density-only", "proserve-no-budget")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of a comparison share.

    weights: of the classes, as many as there are, drawn with equal shares. ttft_slo_ms,
    tpot_slo_ms: of all. pace: by how much steps take longer than policies are told.
    """

    lengths: Lengths
    engine: Engine = field(default_factory=lambda: replace(H800_QWEN3_32B, mixed_chunk=True))
    weights: tuple[float, ...] = (2.0, 1.0)
    ttft_slo_ms: float = 1000.0
    tpot_slo_ms: float = 100.0
    load: str = "sustained"
    pace: float = 1.0
    config: SageConfig = field(default_factory=SageConfig)

    def requests(self, rate: float, num_requests: int, seed: int) -> list[SimRequest]:
        """At this rate, in requests/s."""
        rng = np.random.default_rng([seed, 7])
        drawn = rng.integers(len(self.lengths), size=num_requests)
        arrivals_s = arrivals_of(self.load, num_requests, seed) / rate
        classes = rng.integers(len(self.weights), size=num_requests)
        return [
            self._request(index, arrival_s, of_class)
            for index, arrival_s, of_class in zip(
                drawn.tolist(), arrivals_s.tolist(), classes.tolist(), strict=True
            )
        ]

    def _request(self, index: int, arrival_s: float, of_class: int) -> SimRequest:
        weight = self.weights[of_class]
        return SimRequest(
            arrival_s=arrival_s,
            input_tokens=int(self.lengths.input_tokens[index]),
            output_tokens=min(CAP_TOKENS, int(self.lengths.output_tokens[index])),
            max_new_tokens=CAP_TOKENS,
            distribution=self.lengths.foreseen(index),
            class_name=f"w{weight:g}",
            hints=Hints(
                weight=weight,
                ttft_slo_ms=self.ttft_slo_ms,
                tpot_slo_ms=self.tpot_slo_ms,
                slo_class=f"w{weight:g}",
                first_token_weight=self.lengths.first_token_weight,
            ),
        )

    def capacity(self) -> float:
        """Requests/s that first come, first served sustains with steps within the TPOT: of a burst,
        the same for all seeds."""
        burst = [replace(r, arrival_s=0.0) for r in self.requests(1.0, 300, seed=1_000_003)]
        result = self.served("sarathi-fcfs", burst)
        return Saturation.measured(result.ttft_s, result.ttlt_s).capacity

    def served(self, policy: str, requests: Sequence[SimRequest]) -> Result:
        """By a policy of ours, one of RIVALS, or one of SGLang's (`fcfs/unmixed` without mixed
        chunks)."""
        name, _, unmixed = policy.partition("/")
        engine = replace(self.engine, mixed_chunk=False) if unmixed else self.engine
        options = Options(preempt=True, pace=self.pace)
        chosen = rival(name, engine.server_facts()) if name in RIVALS else name
        return simulate(engine, chosen, self.config, requests, options)


def numbers_of(result: Served, lightest: str) -> dict[str, Any]:
    """Of a run, by name. lightest: the class of the least weight."""
    attained = result.attainment()
    light = np.array([hints.slo_class == lightest for hints in result.hints])
    return {
        **attained,
        "missed_tdg": 1 - attained["tdg_ratio"],
        "p99_ttft_low_s": _p99(result.ttft_s[light]),
        "output_throughput": float(result.answer_tokens.sum()) / result.duration_s,
    }


def _p99(values: NDArray[np.float64]) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0
