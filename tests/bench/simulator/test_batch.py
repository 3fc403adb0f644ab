"""A closed batch in the simulator."""

from __future__ import annotations

import numpy as np

from bench.simulator.run import simulate
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, known, request


def test_a_batch_ends_sooner_than_by_arrival() -> None:
    rng = np.random.default_rng(0)
    lengths = [300 if rng.random() < 0.15 else 20 for _ in range(40)]
    requests = [
        request(
            0.0, 40, length, distribution=known(*[20] * 6, 300), spans=((prompt, 0, 40),)
        )
        for prompt, length in enumerate(lengths)
        for _ in range(4)
    ]  # fmt: skip
    last_s = {
        policy: simulate(SMALL, policy, CONFIG, requests, CHECKED).metrics()["duration"]
        for policy in ("fcfs", "fcfs-fill", "makespan")
    }
    assert last_s["makespan"] < 0.95 * last_s["fcfs-fill"]
    assert last_s["makespan"] < 0.9 * last_s["fcfs"]
