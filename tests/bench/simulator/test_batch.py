"""A closed batch in the simulator."""

from __future__ import annotations

import numpy as np

from bench.simulator.run import simulate
from tests.bench.simulator.traffic import CONFIG, MANY_SLOTS, known, request


def test_a_burst_ends_though_the_predictor_dies() -> None:
    rng = np.random.default_rng(1)
    requests = []
    for i in range(2000):
        predicted = known(2, 4, 30) if i < 700 else None
        requests.append(request(0.0, 20, int(rng.choice([2, 4, 60])), distribution=predicted))
    result = simulate(MANY_SLOTS, "makespan", CONFIG, requests)
    assert len(result.answer_tokens) == len(requests)
    assert result.num_preemptions.sum() > 0
