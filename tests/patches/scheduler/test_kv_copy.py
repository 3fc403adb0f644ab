"""A swap on SGLang's own radix tree and pools, of 64 tokens and four rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.runtime_context import get_context

from patches.scheduler import kv_copy
from patches.scheduler.kv_copy import (
    can_be_preempted_now,
    freed_tokens,
    is_swapped,
    swap_in,
    swap_out,
)
from tests.patches.schedulers import Server, StandInBatch, make_request, make_tree

NUM_SHARED, NUM_SAID = 16, 5


class Device:
    def __init__(self) -> None:
        self.tree = make_tree()
        self.rows = self.tree.req_to_token_pool
        self.allocator = self.tree.token_to_kv_pool_allocator
        self.kv = self.allocator.get_kvcache().k_buffer[0]
        self.server = Server(
            enable_overlap=False, tree_cache=self.tree, req_to_token_pool=self.rows
        )
        self.scheduler = self.server.scheduler
        self.scheduler.token_to_kv_pool_allocator = self.allocator

    def start(self, question: int, num_said: int = NUM_SAID) -> Any:
        """A request runs whose prompt is a document and a question to it, of one token. The tree
        has it, locked by the request; of its answer num_said tokens have KV."""
        prompt = [*range(NUM_SHARED), 1000 + question]
        (req,) = self.server.arrive(make_request([9], prompt, answer_tokens=num_said + 1))
        match_kv_cache(req, self.tree)
        self.rows.alloc([req])
        found = self.tree.prefix_device_indices(req)
        num_tokens = req.kv.kv_allocated_len = req.kv.kv_committed_len = req.seqlen - 1
        slots = torch.cat([found, self.allocator.alloc(num_tokens - len(found))])
        self.rows.write((req.kv.req_pool_idx, slice(0, num_tokens)), slots.to(torch.int32))
        self.kv[slots[len(found) :]] = torch.rand_like(self.kv[slots[len(found) :]])
        key = RadixKey(array("q", prompt))
        self.tree.insert(InsertParams(key=key, value=slots[: len(prompt)].clone()))
        match_kv_cache(req, self.tree, req.origin_input_ids)
        req.lock, req.kv.cache_protected_len = self.tree.lock(req.last_node), len(prompt)
        return req

    def kv_of(self, req: Any) -> torch.Tensor:
        return self.kv[self.slots_of(req)].clone()

    def slots_of(self, req: Any) -> torch.Tensor:
        return self.rows.req_to_token[req.kv.req_pool_idx, : req.seqlen - 1].long()

    def leave(self, req: Any) -> bool:
        batch = SimpleNamespace(reqs=[req], filter_batch=lambda keep_indices: None)

        def release(index: int, num_others: int, offload_kv: bool) -> None:
            release_kv_cache(req, self.tree, checkpoint=False)
            req.reset_for_retract()

        batch.release_req = release
        return swap_out(self.scheduler, batch, req)

    def come_back(self, *reqs: Any) -> list[Any]:
        back, left = swap_in(self.scheduler, reqs, [])
        found: list[Any] = [] if back is None else [*back]
        assert {*found, *left} == {*reqs}
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    monkeypatch.setattr(kv_copy, "_prebuilt", lambda scheduler, reqs: [*reqs])
    with get_context().override_server_args():
        yield Device()


def test_a_shared_prompt_is_freed_by_the_last_that_reads_it(device: Device) -> None:
    one, other = device.start(1), device.start(2)
    for _ in range(2):  # to ask changes nothing
        assert freed_tokens(device.scheduler, one) == NUM_SAID + 1
    assert device.tree.evictable_size() == 0
    assert device.leave(one)
    assert device.tree.evictable_size() == 1
    assert freed_tokens(device.scheduler, other) == NUM_SAID + 1 + NUM_SHARED
    device.tree.unlock(other.lock)
    other.lock = None
    assert freed_tokens(device.scheduler, other) == NUM_SAID  # it holds this alone


def test_a_waiting_prompt_shares_what_others_lock(device: Device) -> None:
    running = device.start(1)
    device.server.queue(make_request([9], [*range(NUM_SHARED), 7]))
    view = device.server.state.view(StandInBatch([running]))
    for _ in range(2):  # to ask changes nothing
        assert (view.cached_tokens(0), view.shared_tokens(0)) == (NUM_SHARED, NUM_SHARED)
    device.tree.unlock(running.lock)
    assert (view.cached_tokens(0), view.shared_tokens(0)) == (NUM_SHARED, 0)
    assert device.tree.evictable_size() == NUM_SHARED + 1


def test_a_request_between_its_first_and_last_token_can_be_preempted() -> None:
    reqs = [make_request([9], answer_tokens=num_tokens) for num_tokens in (0, 1, 998, 999, 5, 5)]
    reqs[4].to_finish, reqs[5].finished_reason = "aborted", "stop"
    assert [can_be_preempted_now(req) for req in reqs] == [False, True, True, *[False] * 3]


def test_kv_comes_back_beside_what_the_tree_has_kept(device: Device) -> None:
    one, other = device.start(1), device.start(2)
    before, slots = device.kv_of(one), device.slots_of(one)
    assert device.leave(one)
    # Others get its slots, and leave room for what the tree has not.
    device.allocator.alloc(device.allocator.available_size() - NUM_SAID)
    assert device.come_back(one) == [one]
    assert torch.equal(device.kv_of(one), before)
    assert device.slots_of(one)[:-NUM_SAID].equal(slots[:-NUM_SAID])
    assert not is_swapped(one)
    # Its prompt is its own again after the other has gone.
    device.tree.unlock(other.lock)
    device.tree.evict(EvictParams(num_tokens=64))
    assert freed_tokens(device.scheduler, one) == NUM_SHARED + 1 + NUM_SAID


def test_kv_that_was_computed_anew_is_not_shared(device: Device) -> None:
    req = device.start(1)
    before = device.kv_of(req)
    assert device.leave(req)
    device.tree.evict(EvictParams(num_tokens=64))
    device.allocator.alloc(1)  # the other gets other slots
    other = device.start(1)
    assert device.come_back(req) == [req]
    assert not {*device.slots_of(req).tolist()} & {*device.slots_of(other).tolist()}
    assert torch.equal(device.kv_of(req), before)


@pytest.mark.parametrize("no_room", ["slots", "rows"])
def test_who_finds_no_room_leaves_no_trace_and_none_passes_it(device: Device, no_room: str) -> None:
    first, second = device.start(1), device.start(2, 1)
    assert device.leave(first)
    assert device.leave(second)
    if no_room == "rows":
        device.rows.free_slots = []
    else:
        device.allocator.alloc(device.allocator.available_size() - NUM_SAID + 2)
    num_rows = device.rows.available_size()
    assert device.come_back(first, second) == []
    assert (device.tree.protected_size(), device.rows.available_size()) == (0, num_rows)
    assert [is_swapped(req) for req in (first, second)] == [True, True]
    assert (first.lock, first.kv.holds_kv) == (None, False)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_failed_copy_costs_the_copy(
    device: Device, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error("no memory")

    one, _ = device.start(1), device.start(2)
    free_tokens, slots = device.allocator.available_size(), device.slots_of(one)
    with monkeypatch.context() as patch:
        patch.setattr(kv_copy, "backup_kv_cache", fail)
        assert not device.leave(one)
    assert device.slots_of(one).equal(slots)
    assert not is_swapped(one)
    assert device.leave(one)
    monkeypatch.setattr(kv_copy, "restore_kv_cache", fail)
    assert device.come_back(one) == []
    # It is prefilled like any other, and has given all back.
    assert (is_swapped(one), one.lock, one.kv.holds_kv) == (False, None, False)
    assert device.allocator.available_size() == free_tokens + NUM_SAID
    assert device.tree.evictable_size() == 1
