"""Requests leave a stand-in device (tests/patches/fake_device.py) and come back, with SGLang's
pools and radix tree."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from patches.scheduler import kv_arena, kv_copy, view
from patches.scheduler.copies import token_bytes
from patches.scheduler.preemption import Preemption
from sage_sched.app.config import PreemptionConfig
from sage_sched.plan import Preempt, PreemptionMode
from tests.patches.fake_device import FakeDevice
from tests.patches.schedulers import (
    POOLS,
    Server,
    StandInBatch,
    buffers_of,
    make_pool,
    make_request,
    make_tree,
)

NUM_TOKENS, HOST_TOKENS = 12, 64


class Swapping(Server):
    """A server whose requests run, leave and come back. A request's id sets its KV.

    It launches steps as SGLang does: parallel to passes, with results a step later.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, pool: Any = None, **attributes: Any
    ) -> None:
        self.fake = FakeDevice(seed)
        monkeypatch.setattr(torch, "get_device_module", lambda _: self.fake)
        self.tree: Any = make_tree(pool)
        self.rows, self.slots = self.tree.req_to_token_pool, self.tree.token_to_kv_pool_allocator
        super().__init__(
            tree_cache=self.tree, req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots, enable_overlap=True, device="cuda", **attributes,
        )  # fmt: skip
        host_pool_gib = HOST_TOKENS * token_bytes(self.scheduler) / 2**30
        self.preemption = Preemption(self.scheduler, PreemptionConfig(host_pool_gib=host_pool_gib))
        self.state.preemption = self.state.last_preemption = self.preemption
        monkeypatch.setattr(kv_copy, "release_kv_cache", self.freed)
        self.num_left_in_tree = 0
        monkeypatch.setattr(kv_copy, "_prebuilt", lambda _, reqs: self.batch_of(reqs))
        self.batch = self.batch_of([])
        self.buffers = buffers_of(self.slots.get_kvcache())
        self.schedule, self.forward = self.fake.current_stream(), self.fake.Stream()
        self.latest = self.fake.Event()
        self.fake.num_syncs = 0  # without the trial at the start

    def batch_of(self, reqs: list[Any]) -> Any:
        batch: Any = StandInBatch(reqs)

        def release(index: int, *args: Any, **kw: Any) -> None:
            req = batch.reqs[index]
            self.freed(req, self.tree, checkpoint=False)
            req.reset_for_retract()

        batch.release_req = release
        batch.merge_batch = lambda other: batch.reqs.extend(other.reqs)
        return batch

    def freed(self, req: Any, tree: Any, *, checkpoint: bool) -> None:
        """Do what release_kv_cache does, which reads the flags of a server."""
        own = slice(req.kv.cache_protected_len, req.kv.kv_committed_len)
        self.slots.free(self.rows.req_to_token[req.kv.req_pool_idx, own].long())
        self.num_left_in_tree += checkpoint
        self.rows.free(req)
        req.kv.mark_kv_released()

    def kv(self, req: Any) -> list[Any]:
        """Return the KV of a request, by buffer, with a row for each token but the newest."""
        seed = 31 * int(req.rid)
        with _disable_current_modes():
            shapes = [(req.seqlen - 1, *buffer.shape[1:]) for buffer in self.buffers]
            return [
                (torch.arange(seed + place, seed + place + 7 * math.prod(shape), 7) % 251)
                .reshape(shape)
                .to(buffer.dtype)
                for place, (shape, buffer) in enumerate(zip(shapes, self.buffers, strict=True))
            ]

    def start(self, number: int, num_tokens: int = NUM_TOKENS) -> Any:
        """Start a request of this many tokens."""
        (req,) = self.arrive(make_request([9], [number] * (num_tokens - 2), answer_tokens=2))
        req.rid = str(number)
        self.rows.alloc([req])
        slots = self.slots.alloc(num_tokens - 1)
        self.rows.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(slots)
        self.write(req, len(slots))
        self.batch.reqs.append(req)
        return req

    def slots_of(self, req: Any) -> torch.Tensor:
        rows = self.rows.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1]
        return rows.long()  # type: ignore[no-any-return]

    def write(self, req: Any, num_tokens: int) -> None:
        """Write the KV of a request's first tokens."""
        slots = self.slots_of(req)[:num_tokens]
        for buffer, rows in zip(self.buffers, self.kv(req), strict=True):
            buffer.index_copy_(0, slots, rows[:num_tokens])

    def step(self, starts: list[tuple[int, int]], num_done: int) -> None:
        """Launch a step in which requests start, and wait for the results of the one before, while
        the device does some of its work."""
        self.forward.wait_stream(self.schedule)
        with self.fake.stream(self.forward):
            for number, num_tokens in starts:
                self.start(number, num_tokens)
        before, self.latest = self.latest, self.forward.record_event()
        self.fake.work(num_done)
        self.fake.work(until=before.query)

    def preempt(self, *reqs: Any) -> list[Any]:
        actions = [Preempt(req.sage.job, PreemptionMode.SWAP, "for a test") for req in reqs]
        gone = self.preemption.preempt(self.batch, actions)
        self.scheduler.waiting_queue += gone
        return gone

    def resume(self, *reqs: Any) -> list[Any]:
        left = self.preemption.resume(self.batch, reqs)
        coming = self.preemption.returning
        others = [req for req in self.scheduler.waiting_queue if req not in coming]
        self.scheduler.waiting_queue = [*others, *coming]
        return left

    def next_pass(self, is_kept: Callable[[], bool] = lambda: False) -> None:
        """is_kept: whether half of a returning request's KV was in the radix tree."""
        for req in self.preemption.returning:
            req.kv.cache_protected_len = req.seqlen // 2 if is_kept() else 0
            self.write(req, req.kv.cache_protected_len)
        self.batch = self.preemption.join(self.batch)
        for req in self.batch.reqs:
            req.kv.cache_protected_len = 0  # the tree has none of it

    def wrong(self) -> list[str]:
        """Return the running requests whose KV is not theirs."""
        self.fake.work()
        found = []
        for req in self.batch.reqs:
            slots, both = self.slots_of(req), zip(self.buffers, self.kv(req), strict=True)
            if not all(torch.equal(buffer[slots], rows) for buffer, rows in both):
                found.append(req.rid)
        return found


@pytest.fixture(autouse=True)
def python_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")


@pytest.mark.parametrize("seed", range(24))
def test_nothing_waits_and_no_kv_is_mixed_up(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    pool, chance = make_pool(*[*POOLS.values()][seed % len(POOLS)]), random.Random(seed)
    row_bytes = sum(buffer[0].nbytes for buffer in buffers_of(pool))
    monkeypatch.setattr(kv_arena, "_STAGING_BYTES", 4 * 8 * row_bytes)  # parts of eight tokens
    monkeypatch.setattr(kv_arena, "_SEGMENT_BYTES", 16 * row_bytes)
    server, number = Swapping(monkeypatch, seed, pool), 0
    with server.fake.deferring():
        for _ in range(60):
            server.next_pass(lambda: chance.random() < 0.3)
            waiting = server.scheduler.waiting_queue
            copied = view.swapped(waiting)
            # SGLang has not seen the results of the latest step yet, so its requests stay.
            seen = [req for req in server.batch.reqs if req.rid != str(number)]
            if seen and chance.random() < 0.6:
                server.preempt(*chance.sample(seen, chance.randint(1, len(seen))))
            if copied and chance.random() < 0.6:
                server.resume(*chance.sample(copied, chance.randint(1, len(copied))))
            elif copied and chance.random() < 0.2:
                gone = chance.choice(copied)
                server.scheduler.waiting_queue.remove(gone)
                server.preemption.aborted(gone)
            if chance.random() < 0.1:
                server.preemption.recall()
            num_tokens, starts = chance.randint(3, 12), list[tuple[int, int]]()
            if server.rows.available_size() and server.slots.available_size() >= num_tokens:
                number += 1
                starts = [(number, num_tokens)]
            server.step(starts, chance.randint(0, 30))
        server.next_pass()
        assert server.fake.num_syncs == 0
    assert server.preemption.stats()["num_resumed"] > 5
    # All come back, and nothing is lost: rows, slots and places in host memory.
    while server.batch.reqs or view.swapped(server.scheduler.waiting_queue):
        assert server.wrong() == []
        while server.batch.reqs:
            kv_copy.retract(server.batch, server.batch.reqs[0])
        server.resume(*view.swapped(server.scheduler.waiting_queue))
        server.next_pass()
    assert (server.rows.available_size(), server.slots.available_size()) == (8, 64)
    assert server.preemption._copies._arena._places.take([1]) is not None


@contextmanager
def coming(server: Swapping) -> Iterator[Any]:
    req = server.start(7)
    assert server.preempt(req) == [req]
    server.next_pass()
    server.resume(req)
    assert (server.batch.reqs, view.is_swapped(req)) == ([], True)
    yield req
    server.next_pass()


def test_a_request_joins_one_pass_later_unless_it_is_aborted_or_the_cache_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Swapping(monkeypatch)
    with coming(server) as req:
        owners = server.hooks["_requests_owning_rows"](lambda _: [], object())
        assert owners == [req]
    assert (server.batch.reqs, server.wrong()) == ([req], [])
    kv_copy.retract(server.batch, req)
    with coming(server) as req:
        server.scheduler.waiting_queue.remove(req)
        server.scheduler._release_aborted_request = None
        server.hooks["_release_aborted_request"](server.scheduler, req)
    assert (server.batch.reqs, server.slots.available_size()) == ([], 64)
    with coming(server) as req:
        server.state.core.last_plan.num_arrivals = 0
        server.hooks["flush_cache"](lambda _: False, server.scheduler)  # it was busy
        assert server.state.core.last_plan.num_arrivals < 0  # it may be the first of the queue
    assert (server.batch.reqs, server.slots.available_size()) == ([], 64)
    server.resume(req)
    server.next_pass()
    assert (server.batch.reqs, server.wrong()) == ([req], [])
    kv_copy.retract(server.batch, req)
    with coming(server) as req:
        server.hooks["flush_cache"](lambda _: True, server.scheduler)
    assert (server.batch.reqs, view.is_swapped(req)) == ([], False)
    assert server.scheduler.waiting_queue == [req]


def test_without_a_place_in_host_memory_kv_stays_in_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Swapping(monkeypatch)
    monkeypatch.setattr(server.preemption._copies._arena._places, "take", lambda sizes: None)
    req = server.start(7)
    assert server.preempt(req) == [req]
    assert not view.is_swapped(req)
    assert server.num_left_in_tree == server.preemption.stats()["num_left_in_tree"] == 1


@pytest.mark.parametrize(("theirs", "num_gone"), [(2, 2), (1, 1), (0, 0)])
def test_ranks_follow_the_rank_whose_copy_fails_first(
    monkeypatch: pytest.MonkeyPatch, theirs: int, num_gone: int
) -> None:
    """theirs: how many copies the other rank has made."""
    server = Swapping(monkeypatch)
    one, two = server.start(1), server.start(2)
    monkeypatch.setattr(kv_copy, "least", lambda _, number: min(number, theirs))
    assert server.preempt(one, two) == [one, two][:num_gone]
    assert server.batch.reqs == [one, two][num_gone:]
    assert [view.is_swapped(req) for req in (one, two)] == [num_gone > 0, num_gone > 1]
    if num_gone == 2:  # two requests come back; the other rank writes one back
        monkeypatch.setattr(kv_copy, "least", lambda _, number: min(number, 1))
        server.next_pass()
        server.resume(one, two)
        server.next_pass()
        assert (server.batch.reqs, server.scheduler.waiting_queue) == ([one], [two])
        assert not view.is_swapped(two)
        assert server.slots.available_size() == 64 - NUM_TOKENS + 1
