"""Copies beside compute, on a stand-in device whose streams run in any order that events allow."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from patches.scheduler import kv_arena
from patches.scheduler.kv_arena import Copy, KvArena
from patches.scheduler.places import Places
from tests.patches.fake_device import FakeDevice

NUM_SLOTS, NUM_HOST_TOKENS, MOST_TOKENS = 96, 64, 24


def of_pool(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    rows = [torch.empty(NUM_SLOTS, *shape).uniform_(0, 200) for shape in shapes]
    return [one.to(torch.uint8) if dtype == torch.uint8 else one.to(dtype) for one in rows]


def index(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


POOLS = {
    "float32": of_pool(torch.float32, *[(2, 4)] * 4),
    "bfloat16": of_pool(torch.bfloat16, *[(2, 8)] * 4),
    "of eight bits": of_pool(torch.uint8, *[(3, 5)] * 4),  # as SGLang stores them
    "latent": of_pool(torch.bfloat16, *[(1, 20)] * 3),
}


class Server:
    """A pool whose requests leave and come back, and forward passes that write to it.

    Every pass is launched as SGLang launches it. What a request's KV has to be is kept aside.
    """

    def __init__(self, pool: list[torch.Tensor], seed: int, device: FakeDevice) -> None:
        self.pool, self.device, self.random = pool, device, random.Random(seed)
        self.arena = KvArena(pool, NUM_HOST_TOKENS)
        self.schedule, self.forward = device.current_stream(), device.Stream()
        self.free = [*range(NUM_SLOTS)]
        # By request: its slots, or its copy, and its KV. The last slot is for the newest token,
        # whose KV is dropped.
        self.running: dict[int, tuple[list[int], list[Any]]] = {}
        self.copied: dict[int, tuple[Copy, list[Any]]] = {}
        self.coming: list[tuple[int, Copy, list[int], list[Any]]] = []
        self.num_moves = self.num_started = 0
        self.latest = device.Event()

    def write(self, slots: list[int], kv: list[Any]) -> None:
        for buffer, rows in zip(self.pool, kv, strict=True):
            buffer.index_copy_(0, index(slots), rows)

    def kv(self, num_tokens: int) -> list[Any]:
        shapes = [(num_tokens, *buffer.shape[1:]) for buffer in self.pool]
        with _disable_current_modes():
            return [
                torch.randint(0, 200, shape).to(buffer.dtype)
                for shape, buffer in zip(shapes, self.pool, strict=True)
            ]

    def taken(self, num_tokens: int) -> list[int] | None:
        if len(self.free) < num_tokens:
            return None
        self.random.shuffle(self.free)
        taken, self.free = self.free[:num_tokens], self.free[num_tokens:]
        return taken

    def a_pass(self) -> None:
        for name, copy, slots, kv in self.coming:
            num_kept = self.random.choice((0, 0, len(slots) // 2))
            self.write(slots[:num_kept], [rows[:num_kept] for rows in kv])  # it was in the tree
            self.arena.put_back(copy, index(slots[:-1]), num_kept)
            self.running[name] = slots, kv
            self.num_moves += 1
        self.coming = []
        # SGLang has not seen the results of the latest step yet, so its requests stay.
        seen = sorted(self.running.keys() - {self.num_started - 1})
        for name in self.random.sample(seen, min(2, len(seen))):
            slots, kv = self.running[name]
            copy = self.arena.copy_out(index(slots[:-1]))
            if copy is not None:
                self.copied[name] = copy, kv
                self.num_moves += 1
            del self.running[name]
            self.free += slots
        for name in self.random.sample(sorted(self.copied), min(2, len(self.copied))):
            copy, kv = self.copied[name]
            if (found := self.taken(copy.num_tokens + 1)) is not None:
                self.arena.fetch(copy)
                self.coming.append((name, copy, found, kv))
                del self.copied[name]
        if self.coming and self.random.random() < 0.2:  # an abort, or a flush
            _, copy, slots, _ = self.coming.pop()
            self.arena.free(copy)
            self.free += slots
        self.step()

    def step(self) -> None:
        """Launch a step, and wait for the results of the one before."""
        started = self.taken((num_tokens := self.random.randint(1, MOST_TOKENS)) + 1)
        self.forward.wait_stream(self.schedule)
        with self.device.stream(self.forward):
            newest = [slots[-1] for slots, _ in self.running.values()]
            self.write(newest, self.kv(len(newest)))
            if started is not None:
                kv = self.kv(num_tokens)
                self.write(started[:-1], kv)
                self.running[self.num_started] = started, kv
                self.num_started += 1
        before, self.latest = self.latest, self.forward.record_event()
        self.device.work(self.random.randint(0, 60))
        self.device.work(until=before.query)

    def differs(self) -> list[int]:
        self.device.work()
        return [
            name
            for name, (slots, kv) in self.running.items()
            if not all(
                torch.equal(buffer[slots[:-1]], rows)
                for buffer, rows in zip(self.pool, kv, strict=True)
            )
        ]  # fmt: skip


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_kv_comes_back_as_it_was_and_nothing_waits(
    pool: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = sum(buffer[0].nbytes for buffer in pool)
    monkeypatch.setattr(kv_arena, "_STAGING_BYTES", 4 * 10 * row_bytes)  # parts of ten tokens
    monkeypatch.setattr(kv_arena, "_SEGMENT_BYTES", 32 * row_bytes)
    num_moves, seed = 0, 0
    while num_moves < 750:  # 3,000 in all
        device = FakeDevice(seed)
        monkeypatch.setattr(torch, "get_device_module", lambda _, device=device: device)
        server = Server([buffer.clone() for buffer in pool], seed, device)
        with device.deferring():
            for _ in range(40):
                server.a_pass()
        assert device.num_syncs == 0
        assert server.differs() == []
        assert len(server.copied) + len(server.coming) + len(server.running) > 2
        num_moves, seed = num_moves + server.num_moves, seed + 1


def test_places_do_not_overlap_and_come_back() -> None:
    chance, places, taken = random.Random(0), Places(1000, 256), dict[int, int]()
    for _ in range(3000):
        if taken and chance.random() < 0.5:
            start = chance.choice([*taken])
            places.give_back([start], [taken.pop(start)])
            continue
        sizes = [chance.randint(1, 100) for _ in range(chance.randint(1, 3))]
        for start, size in zip(places.take(sizes) or [], sizes, strict=False):
            assert start // 256 == (start + size - 1) // 256
            assert all(start + size <= one or one + n <= start for one, n in taken.items())
            taken[start] = size
    places.give_back([*taken], [*taken.values()])
    assert places.take([256, 256, 256, 232]) == [0, 256, 512, 768]
