"""A closed batch in the simulator."""

from __future__ import annotations

import numpy as np

from bench.simulator.run import simulate
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, request


def test_a_batch_ends_sooner_than_by_arrival() -> None:
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(160):
        is_long = rng.random() < 0.15
        predicted = known(20, *[300] * 2) if is_long else known(*[20] * 6, 300)
        requests.append(request(0.0, 40, 300 if is_long else 20, distribution=predicted))
    last_s = {
        policy: simulate(SMALL, policy, CONFIG, requests, CHECKED).metrics()["duration"]
        for policy in ("fcfs", "fcfs-fill", "makespan")
    }
    assert last_s["makespan"] < 0.95 * last_s["fcfs-fill"]
    assert last_s["makespan"] < 0.9 * last_s["fcfs"]
