"""A request whose adapter finds no room is not passed for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bench.simulator.presets import PRESETS
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.job import Hints
from tests.bench.simulator.traffic import CONFIG, known, request

ENGINE = replace(PRESETS["h800-qwen3-32b"], max_loras_per_batch=1)


@pytest.mark.parametrize("preempt", [True, False])
@pytest.mark.parametrize(
    "policy", ["sage", "urgency", "qllm", "fcfs-fill", "proserve", "ltr", "ssjf"]
)
def test_no_request_starves_for_an_adapter(policy: str, preempt: bool) -> None:
    """A request of adapter b comes after 30 s; requests of adapter a never run out, at a third
    of the server's capacity."""
    rng = random.Random(0)
    hints = Hints(urgency=1, ttft_slo_ms=1000.0)
    of_b = request(30.0, 500, 20, 1000, distribution=known(20), hints=hints, adapter="b")
    requests = [of_b]
    for second in range(100):
        at_s, length = second + rng.random(), rng.randint(50, 300)
        said = {"distribution": known(*[length] * 8), "hints": Hints(ttft_slo_ms=5000.0)}
        requests.append(request(at_s, 500, length, 1000, adapter="a", **said))
    requests.sort(key=lambda each: each.arrival_s)
    result = simulate(ENGINE, policy, CONFIG, requests, Options(preempt=preempt))
    assert result.ttft_s[requests.index(of_b)] < 60
