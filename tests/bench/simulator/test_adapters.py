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
    """Six requests of adapter b come from 30 s on. Those of adapter a never run out, and take a
    third of the server's capacity."""
    rng = random.Random(0)
    hints = Hints(urgency=1, ttft_slo_ms=1000.0)
    of_b = [
        request(at_s, 500, 20, 1000, distribution=known(20), hints=hints, adapter="b")
        for at_s in range(30, 60, 5)
    ]
    of_a = []
    for second in range(100):
        at_s, length = second + rng.random(), rng.randint(50, 300)
        said = {"distribution": known(*[length] * 8), "hints": Hints(ttft_slo_ms=5000.0)}
        of_a.append(request(at_s, 500, length, 1000, adapter="a", **said))
    requests = sorted([*of_a, *of_b], key=lambda each: each.arrival_s)
    result = simulate(ENGINE, policy, CONFIG, requests, Options(preempt=preempt))
    ttft_s = dict(zip(map(id, requests), result.ttft_s.tolist(), strict=True))
    assert max(ttft_s[id(each)] for each in of_b) < 60
    # The queue closes for each of them anew, not at once.
    assert sum(ttft_s[id(each)] for each in of_a) < len(of_a)
