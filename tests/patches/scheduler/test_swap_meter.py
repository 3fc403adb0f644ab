from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches.scheduler import swap_meter
from patches.scheduler.copies import Copies, token_bytes
from patches.scheduler.swap_meter import SwapMeter
from tests.patches.fake_device import FakeDevice
from tests.patches.schedulers import POOLS, buffers_of, make_allocator, make_pool

# Seconds of the model in one of the host.
PACE = 1000.0


def meter_of(pool: Any = None, told: float | None = None) -> tuple[SwapMeter, list[str], Any]:
    """Return a meter, its notes before measurements, and its scheduler. told: rank 0's
    measurement."""
    allocator, noted = make_allocator(pool), list[str]()
    ranks = SimpleNamespace(broadcast_object=lambda measured: measured if told is None else told)
    scheduler: Any = SimpleNamespace(
        device="cpu", token_to_kv_pool_allocator=allocator, attn_tp_group=ranks, tree_cache=None,
        server_args=SimpleNamespace(disaggregation_mode="null"),
    )  # fmt: skip
    steps = SimpleNamespace(interrupted=lambda: noted.append("interrupted"))
    calibration: Any = SimpleNamespace(steps=steps, pace=lambda: PACE)
    return SwapMeter(scheduler, calibration, Copies(scheduler, 64)), noted, scheduler


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes moves of 800 tokens, on a simulated clock."""
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr(swap_meter, "time", clock)

    def moved(meter: SwapMeter, token_s: float, num_times: int) -> None:
        for _ in range(num_times):
            with meter.timing() as one:
                now_s[0] += 800 * token_s
                one.num_tokens = 800

    return moved


@pytest.mark.parametrize("kind", POOLS.values(), ids=POOLS)
def test_the_trial_leaves_the_pool_as_it_was(kind: Any) -> None:
    pool = make_pool(*kind)
    buffers = buffers_of(pool)
    for buffer in buffers:
        buffer.copy_(torch.randint_like(buffer, 100))
    before = [buffer.clone() for buffer in buffers]
    meter, _, scheduler = meter_of(pool)
    assert meter.token_s > 0
    assert all(map(torch.equal, before, buffers))
    assert token_bytes(scheduler) >= sum(buffer[0].nbytes for buffer in buffers)


def test_all_ranks_use_the_first_ranks_measurements(move: Callable[..., None]) -> None:
    meter, _, scheduler = meter_of(told=0.25)
    scheduler.attn_tp_group.broadcast_object = lambda measured: 0.5
    for num_times, token_s in ((15, 0.25), (1, 0.5)):
        move(meter, 1.0, num_times)
        assert meter.token_s == token_s


def test_a_stall_is_not_taken_for_the_price_of_a_move(move: Callable[..., None]) -> None:
    meter, _, _ = meter_of()
    trial = meter.token_s
    for token_s, num_times in ((5.0, 64), (80_000.0, 1), (5.0, 15)):
        move(meter, token_s, num_times)
    assert meter.token_s == pytest.approx(PACE * 5.0)
    assert (meter.total_s, meter.total_tokens) == (800 * (79 * 5.0 + 80_000.0), 800 * 80)
    # Lasting costs are learned. They are forgotten if they have stopped all moves.
    move(meter, 80_000.0, 64)
    for served_tokens, known in ((500, False), (1500, False), (1501, True)):
        if served_tokens > meter.rests_at_tokens:
            meter.rest(served_tokens, 1000)
        assert meter.token_s == (trial if known else pytest.approx(PACE * 80_000.0))
    move(meter, 5.0, 16)
    assert meter.token_s == pytest.approx(PACE * 5.0)


def test_failed_moves_are_not_measured_and_steps_include_no_move() -> None:
    # A request that finds no room tries again in every pass, and would be a very fast move.
    meter, noted, _ = meter_of()
    trial = meter.token_s
    for _ in range(16):
        with meter.timing():
            noted.append("moved")
    assert noted == ["interrupted", "moved"] * 16
    assert meter.token_s == trial


def test_the_device_times_a_move_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, _, scheduler = meter_of()
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    scheduler.device = "cuda"
    for _ in range(16):
        with meter.timing() as one:
            device.works_for(device.current_stream(), 40.0)
            one.num_tokens = 800
    trial = meter.token_s
    assert meter.total_s == 0.0
    device.work()
    for _ in range(16):
        with meter.timing() as one:
            one.num_tokens = 800
    assert (meter.total_s, trial) == (pytest.approx(0.64), meter._trial_s)
    assert meter.token_s == pytest.approx(PACE * 5e-5)
    assert device.num_syncs == 0
