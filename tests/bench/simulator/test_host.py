"""The host's time adds to a step only where the device does not hide it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.experiment import records
from bench.simulator.host import Host
from bench.simulator.presets import Engine
from bench.simulator.result import Result
from bench.simulator.run import simulate
from sage_sched.steps import StepTime
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, burst, request

_DEVICE = StepTime(
    prefill_base_s=0.01,
    prefill_request_s=0.0,
    prefill_token_s=0.0,
    prefill_pair_s=0.0,
    decode_base_s=0.01,
    decode_request_s=0.0,
    decode_kv_token_s=1e-4,
)


def _alone_s(host: Host, policy: str = "fcfs") -> float:
    """Return the TTLT of 101 tokens after 99. The n-th decode step takes the device 20 ms and n
    times 0.1 ms."""
    engine = replace(SMALL, step_time=_DEVICE, host=host)
    result = simulate(engine, policy, CONFIG, [request(0.0, 99, 101, 200)], CHECKED)
    return float(result.ttlt_s[0])


def test_a_step_takes_the_longer_of_device_and_host() -> None:
    device_ms = 10 + sum(20 + 0.1 * n for n in range(100))
    assert _alone_s(Host()) == pytest.approx(device_ms / 1e3)
    assert _alone_s(Host(step_s=0.005, request_s=0.004)) == pytest.approx(device_ms / 1e3)
    # The host's 25 ms count until the device's steps are longer.
    decodes_ms = sum(max(20 + 0.1 * n, 25) for n in range(100))
    for policy in ("fcfs", "fcfs-fill"):
        found_s = _alone_s(Host(step_s=0.019, request_s=0.006), policy)
        assert found_s == pytest.approx((19 + decodes_ms) / 1e3)


def _under_pressure(policy: str, host: Host) -> Result:
    engine: Engine = replace(SMALL, step_time=_DEVICE, host=host)
    return simulate(engine, policy, CONFIG, burst(), CHECKED)


def test_only_our_policies_pay_for_queues_plans_and_moves() -> None:
    ours = Host(queued_s=0.5, plan_s=0.5, move_s=0.5, drains=True)
    for policy, longer in (("fcfs", False), ("sage", True)):
        without, with_ours = (_under_pressure(policy, host) for host in (Host(), ours))
        assert (with_ours.ttlt_s.mean() > without.ttlt_s.mean()) == longer


def test_each_move_delays_the_device() -> None:
    free, slow = (_under_pressure("sage", Host(move_s=s)) for s in (0.0, 1.0))
    assert free.moved_tokens
    assert slow.moved_tokens
    assert slow.duration_s > free.duration_s + 1.0


def test_the_gpu_is_simulated_as_it_was_measured() -> None:
    """The host has the costs measured then, and serves the same requests (see presets.toml)."""
    made = records.read(records.file_of("gpu"))

    def of(engine: str, arm: str, metric: str) -> NDArray[np.float64]:
        """Return a metric of each seed."""
        runs = {each.seed: each for each in made if (each.engine, each.arm) == (engine, arm)}
        return np.array([runs[seed].metrics[metric] for seed in range(5)])

    def ratio(engine: str) -> float:
        """Return the ratio of sage's means over all seeds to those of the tuned server."""
        means = [of(engine, arm, "mean_e2e_latency_ms").mean() for arm in ("sage", "fcfs@clip=256")]
        return float(means[0] / means[1])

    assert ratio("sim") == pytest.approx(ratio("server"), abs=0.05)
    for arm in ("fcfs", "fcfs@clip=256", "sage"):
        for metric in ("mean_e2e_latency_ms", "duration", "good_share"):
            measured, simulated = (np.median(of(e, arm, metric)) for e in ("server", "sim"))
            assert simulated == pytest.approx(measured, rel=0.1), (arm, metric)
