"""Many engines behind one dispatcher."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulator.cluster import simulate_cluster
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.config import SageConfig
from tests.bench.simulator.traffic import SMALL, mixed, request

CONFIG = SageConfig()


@pytest.mark.parametrize("preempt", [False, True])
def test_a_cluster_of_one_is_the_engine(preempt: bool) -> None:
    requests = mixed(150, 6.0, 8)
    options = Options(preempt=preempt, check=True)
    alone = simulate(SMALL, "sage", CONFIG, requests, options)
    cluster = simulate_cluster(SMALL, 1, "sage", CONFIG, requests, options)
    assert cluster.ttlt_s == pytest.approx(alone.ttlt_s)


def test_requests_go_where_the_fewest_are() -> None:
    requests = [request(0.01 * i, 10, 50) for i in range(8)]
    result = simulate_cluster(SMALL, 8, "fcfs", CONFIG, requests, Options(check=True))
    assert result.ttlt_s == pytest.approx(result.alone_s)
    # A finished request counts no more: the third goes to the first engine, idle again.
    requests = [request(0.0, 10, 2), request(0.0, 10, 300), request(2.0, 10, 2)]
    result = simulate_cluster(SMALL, 2, "fcfs", CONFIG, requests, Options(check=True))
    assert result.ttlt_s == pytest.approx(result.alone_s)


def test_ten_engines_serve_ten_times_the_load() -> None:
    apart = [simulate(SMALL, "sage", CONFIG, mixed(100, 3.0, seed)).ttlt_s for seed in range(20)]
    ten = simulate_cluster(SMALL, 10, "sage", CONFIG, mixed(1000, 30.0, 9), Options(check=True))
    assert float(np.mean(ten.ttlt_s)) < 1.1 * float(np.mean(apart))


def test_the_same_input_gives_the_same_bytes() -> None:
    requests = mixed(300, 20.0, 10)
    runs = [simulate_cluster(SMALL, 4, "sage", CONFIG, requests) for _ in range(2)]
    assert runs[0].ttlt_s.tobytes() == runs[1].ttlt_s.tobytes()
