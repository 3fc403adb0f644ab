from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from patches.scheduler.kv_copy import token_bytes
from patches.scheduler.swap_meter import SwapMeter

NUM_TOKENS, NUM_LAYERS = 128, 3


class Calibration:
    """The meter's readings, and whether it was warned of an interruption between steps."""

    def __init__(self) -> None:
        self.steps = self
        self.num_interruptions = 0

    def interrupted(self) -> None:
        self.num_interruptions += 1

    def pace(self) -> float:
        return 1000.0


def calibration() -> Any:
    return Calibration()


def mha() -> MHATokenToKVPool:
    return MHATokenToKVPool(
        NUM_TOKENS, 1, torch.bfloat16, 2, 16, NUM_LAYERS, "cpu", enable_memory_saver=False
    )


def mha_of_eight_bits() -> MHATokenToKVPool:
    return MHATokenToKVPool(
        NUM_TOKENS, 1, torch.float8_e4m3fn, 2, 16, NUM_LAYERS, "cpu", enable_memory_saver=False
    )


def mla() -> MLATokenToKVPool:
    return MLATokenToKVPool(
        NUM_TOKENS, 1, torch.bfloat16, 32, 8, NUM_LAYERS, "cpu", enable_memory_saver=False
    )


def scheduler(pool: Any, told: float | None = None) -> Any:
    """The fields of a scheduler that the meter reads; told: the measurement of rank 0."""

    def broadcast_object(measured: float) -> float:
        return measured if told is None else told

    return SimpleNamespace(
        device="cpu",
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(
            NUM_TOKENS, torch.bfloat16, "cpu", pool, False
        ),
        attn_tp_group=SimpleNamespace(broadcast_object=broadcast_object),
    )


def buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        yield


@pytest.mark.parametrize("make", [mha, mha_of_eight_bits, mla])
class TestPools:
    def test_the_trial_leaves_the_pool_as_it_was(self, make: Any) -> None:
        pool = make()
        for buffer in buffers(pool):
            buffer.copy_(torch.randint_like(buffer, 100))
        before = [buffer.clone() for buffer in buffers(pool)]
        assert SwapMeter(scheduler(pool), calibration()).token_s > 0
        assert all(map(torch.equal, before, buffers(pool)))

    def test_a_copy_is_all_of_a_tokens_kv(self, make: Any) -> None:
        allocator = scheduler(make()).token_to_kv_pool_allocator
        pool = allocator.get_kvcache()
        for buffer in buffers(pool):
            buffer.copy_(torch.randint_like(buffer, 100))
        old, new = torch.arange(1, 40), torch.arange(60, 99)
        before = [buffer[old].clone() for buffer in buffers(pool)]
        copy = allocator.get_cpu_copy(old)
        for buffer in buffers(pool):
            buffer.zero_()
        allocator.load_cpu_copy(copy, new)
        assert all(torch.equal(b[new], was) for b, was in zip(buffers(pool), before, strict=True))
        assert token_bytes(SimpleNamespace(token_to_kv_pool_allocator=allocator)) >= sum(
            buffer[0].nbytes for buffer in buffers(pool)
        )


def test_all_ranks_count_with_what_the_first_has_measured() -> None:
    meter = SwapMeter(scheduler(mha(), told=0.25), calibration())
    assert meter.token_s == 0.25
    meter._scheduler.attn_tp_group.broadcast_object = lambda measured: 0.5
    for _ in range(16):
        assert meter.token_s == 0.25
        with meter.timing() as move:
            move.num_tokens = 10
    assert meter.token_s == 0.5


def test_it_learns_from_the_moves_in_seconds_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SwapMeter(scheduler(mha()), calibration())
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("patches.scheduler.swap_meter.time", clock)
    for _ in range(16):
        with meter.timing() as move:
            move.num_tokens = 10_000
    # A move took a second by that clock, and a second is a thousand of the model's.
    assert meter.token_s == pytest.approx(1000 / 10_000)


def test_a_stall_is_not_taken_for_the_price_of_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SwapMeter(scheduler(mha()), calibration())
    trial = meter.token_s
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0])
    monkeypatch.setattr("patches.scheduler.swap_meter.time", clock)

    def move(token_s: float, num_times: int) -> None:
        for _ in range(num_times):
            with meter.timing() as one:
                now_s[0] += 800 * token_s
                one.num_tokens = 800

    move(5.0, 64)
    move(80_000.0, 1)
    move(5.0, 15)
    assert meter.token_s == pytest.approx(1000 * 5.0)
    # Lasting costs are learned, and forgotten if they have stopped all moves.
    move(80_000.0, 64)
    assert meter.token_s == pytest.approx(1000 * 80_000.0)
    for served_tokens in (500, 1500):
        meter.rest(served_tokens, 1000)
        assert meter.token_s == pytest.approx(1000 * 80_000.0)
    meter.rest(1501, 1000)
    assert meter.token_s == trial


def test_a_move_that_did_not_come_off_says_nothing() -> None:
    # A request that finds no room tries again in every pass, and would be a very fast move.
    meter = SwapMeter(scheduler(mha()), calibration())
    trial = meter.token_s
    for _ in range(32):
        with meter.timing():
            pass
    assert meter.token_s == trial


def test_a_move_is_no_part_of_a_step() -> None:
    told = calibration()
    meter = SwapMeter(scheduler(mha()), told)
    assert told.num_interruptions == 0
    with meter.timing():
        assert told.num_interruptions == 1
