"""A request whose adapter finds no room is not passed for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.engines.simulator.presets import PRESETS
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from sage_sched.config import SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints

ENGINE = replace(PRESETS["h800-qwen3-32b"], max_loras_per_batch=1)


def traffic() -> list[SimRequest]:
    """One of adapter b comes after 30 s; those of adapter a never run out, at a third of what the
    server can carry."""
    rng = random.Random(0)

    def request(come_s: float, output_tokens: int, adapter: str, hints: Hints) -> SimRequest:
        known = LengthDistribution.from_samples([output_tokens] * 8, "history")
        return SimRequest(
            come_s, 500, output_tokens, 1000, known, "mixed", hints=hints, adapter=adapter
        )

    requests = [request(30.0, 20, "b", Hints(urgency=1, ttft_slo_ms=1000.0))]
    for second in range(100):
        hints = Hints(ttft_slo_ms=5000.0)
        requests.append(request(second + rng.random(), rng.randint(50, 300), "a", hints))
    return sorted(requests, key=lambda request: request.arrival_s)


@pytest.mark.parametrize("preempt", [True, False])
@pytest.mark.parametrize(
    "policy", ["sage", "urgency", "qllm", "fcfs-fill", "proserve", "ltr", "ssjf"]
)
def test_nobody_waits_for_ever_for_an_adapter(policy: str, preempt: bool) -> None:
    requests = traffic()
    result = simulate(ENGINE, policy, SageConfig(), requests, Options(preempt=preempt))
    ours = next(i for i, one in enumerate(requests) if one.adapter == "b")
    assert result.ttft_s[ours] < 60
