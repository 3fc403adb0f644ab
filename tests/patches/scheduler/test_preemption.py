"""Requests that leave the device and come back, with SGLang's pools and radix tree, on a stand-in
device (tests/patches/fake_device.py)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from patches.scheduler import kv_copy
from patches.scheduler.preemption import Preemption
from sage_sched.app.config import PreemptionConfig
from sage_sched.plan import Preempt, PreemptionMode
from tests.patches.fake_device import FakeDevice
from tests.patches.schedulers import Server, StandInBatch, make_request, make_tree

NUM_TOKENS = 12


class Swapping(Server):
    """A server whose requests run, leave and come back. Each one's KV is its own number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0, **attributes: Any) -> None:
        self.fake = FakeDevice(seed)
        monkeypatch.setattr(torch, "get_device_module", lambda _: self.fake)
        self.tree: Any = make_tree()
        self.rows, self.slots = self.tree.req_to_token_pool, self.tree.token_to_kv_pool_allocator
        super().__init__(
            tree_cache=self.tree, req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots, enable_overlap=True, device="cuda", **attributes,
        )  # fmt: skip
        self.preemption = Preemption(self.scheduler, PreemptionConfig(host_pool_gib=2e-6))
        self.state.preemption = self.state.last_preemption = self.preemption
        monkeypatch.setattr(kv_copy, "release_kv_cache", self.freed)
        self.num_left_in_tree = 0
        monkeypatch.setattr(kv_copy, "_prebuilt", lambda _, reqs: self.batch_of(reqs))
        self.batch = self.batch_of([])
        pool = self.slots.get_kvcache()
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.forward = self.fake.Stream()
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

    def start(self, number: int) -> Any:
        """A request of NUM_TOKENS tokens runs, with KV for all but the newest."""
        (req,) = self.arrive(make_request([9], [number] * (NUM_TOKENS - 2), answer_tokens=2))
        req.rid = str(number)
        self.rows.alloc([req])
        slots = self.slots.alloc(NUM_TOKENS - 1)
        self.rows.write((req.kv.req_pool_idx, slice(0, len(slots))), slots.to(torch.int32))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(slots)
        for buffer in self.buffers:
            buffer.index_fill_(0, slots, float(number))
        self.batch.reqs.append(req)
        return req

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

    def next_pass(self) -> None:
        self.forward.wait_stream(self.fake.current_stream())
        self.batch = self.preemption.join(self.batch)

    def wrong(self) -> list[str]:
        """Return the running requests whose KV is not theirs."""
        self.fake.work()
        found = []
        for req in self.batch.reqs:
            slots = self.rows.req_to_token[req.kv.req_pool_idx, : NUM_TOKENS - 1].long()
            if any(bool((buffer[slots] != float(req.rid)).any()) for buffer in self.buffers):
                found.append(req.rid)
        return found


@pytest.fixture(autouse=True)
def python_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")


@pytest.mark.parametrize("seed", range(4))
def test_nothing_waits_and_no_kv_is_mixed_up(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    server, chance = Swapping(monkeypatch, seed), random.Random(seed)
    number = 0
    with server.fake.deferring():
        for _ in range(60):
            server.next_pass()
            copied = [r for r in server.scheduler.waiting_queue if kv_copy.is_swapped(r)]
            if server.batch.reqs and chance.random() < 0.5:
                server.preempt(*chance.sample(server.batch.reqs, 1))
            if copied and chance.random() < 0.5:
                server.resume(*chance.sample(copied, 1))
            elif copied and chance.random() < 0.2:
                gone = chance.choice(copied)
                server.scheduler.waiting_queue.remove(gone)
                server.preemption.aborted(gone)
            elif chance.random() < 0.1:
                server.preemption.recall()
            if server.rows.available_size() and server.slots.available_size() >= NUM_TOKENS:
                server.start(number := number + 1)
            server.fake.work(chance.randint(0, 40))
        server.next_pass()
        assert server.fake.num_syncs == 0
    assert server.wrong() == []
    assert server.preemption.stats()["num_resumed"] > 5
    # Nothing is lost: rows, slots and places in host memory.
    for req in [*server.scheduler.waiting_queue]:
        server.preemption.aborted(req)
    while server.batch.reqs:
        kv_copy.retract(server.batch, server.batch.reqs[0])
    assert (server.rows.available_size(), server.slots.available_size()) == (4, 64)


@contextmanager
def coming(server: Swapping) -> Iterator[Any]:
    req = server.start(7)
    assert server.preempt(req) == [req]
    server.next_pass()
    server.resume(req)
    assert (server.batch.reqs, kv_copy.is_swapped(req)) == ([], True)
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
        server.hooks["flush_cache"](lambda _: False, server.scheduler)  # it was busy
    assert (server.batch.reqs, server.slots.available_size()) == ([], 64)
    server.resume(req)
    server.next_pass()
    assert (server.batch.reqs, server.wrong()) == ([req], [])
    kv_copy.retract(server.batch, req)
    with coming(server) as req:
        server.hooks["flush_cache"](lambda _: True, server.scheduler)
    assert (server.batch.reqs, kv_copy.is_swapped(req)) == ([], False)
    assert server.scheduler.waiting_queue == [req]


def test_without_a_place_in_host_memory_kv_stays_in_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Swapping(monkeypatch)
    monkeypatch.setattr(server.preemption._copies._arena._places, "take", lambda sizes: None)
    req = server.start(7)
    assert server.preempt(req) == [req]
    assert not kv_copy.is_swapped(req)
    assert server.num_left_in_tree == server.preemption.stats()["num_left_in_tree"] == 1


@pytest.mark.parametrize(("theirs", "num_gone"), [(2, 2), (1, 1), (0, 0)])
def test_ranks_go_by_the_one_whose_copy_fails_first(
    monkeypatch: pytest.MonkeyPatch, theirs: int, num_gone: int
) -> None:
    """theirs: how many copies the other rank has made."""
    server = Swapping(monkeypatch)
    one, two = server.start(1), server.start(2)
    monkeypatch.setattr(kv_copy, "least", lambda _, number: min(number, theirs))
    assert server.preempt(one, two) == [one, two][:num_gone]
    assert server.batch.reqs == [one, two][num_gone:]
    assert [kv_copy.is_swapped(req) for req in (one, two)] == [num_gone > 0, num_gone > 1]
    if num_gone == 2:  # of two that come back, the other rank writes back one
        monkeypatch.setattr(kv_copy, "least", lambda _, number: min(number, 1))
        server.next_pass()
        server.resume(one, two)
        server.next_pass()
        assert (server.batch.reqs, server.scheduler.waiting_queue) == ([one], [two])
        assert not kv_copy.is_swapped(two)
        assert server.slots.available_size() == 64 - NUM_TOKENS + 1
