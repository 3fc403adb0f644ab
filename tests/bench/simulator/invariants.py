"""Invariants that hold at every event. Each check has its number behind it.

1. Conservation: the held pages are the pages of the requests in the batch and of the chunked one,
   with shared pages counted once. The radix tree's other pages on the device are evictable. All fit
   the pool. The tree's KV is on the device or in host memory, which has room.
2. Slots: requests in the batch and the chunked one are at most max_running_requests.
3. Nothing is lost or doubled: each outstanding request is in one place: waiting, chunked or in the
   batch.
4. Exactness: no request has more tokens than its true length, and only a finished one has all. A
   waiting request has a first token if and only if it has been served.
5. Sums: the sums that the batch keeps in closed form equal the sums over its members.
6. Promises: no request passes a waiting one that came before it and has a starvation guarantee.

The node itself always checks that it is work conserving: if a request has come, a step is taken.
result_of checks that each request has finished once, with its true length, and not before it came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench.simulator.presets import Engine
from bench.simulator.radix_tree import RadixTree
from bench.simulator.request import Progress
from bench.simulator.state import EngineState


def watch(
    state: EngineState, before: list[Progress], after: list[Progress], num_outstanding: int
) -> None:
    """Options.watch. Raises AssertionError."""
    check_promises(state, before, after)
    check_state(state, num_outstanding)


def check_state(state: EngineState, num_outstanding: int) -> None:
    """num_outstanding: requests that have come and not finished."""
    decode, pool, chunked = state.decode, state.pool, state.chunked
    for progress in decode:
        decode.sync(progress)
    members = [*decode, *state.returning]
    inside = members if chunked is None else [*members, chunked]
    waiting = [*state.queue]
    _check_pool(state, members)
    assert len(inside) <= state.engine.max_running_requests  # 2
    assert len({*inside, *waiting}) == len(inside) + len(waiting) == num_outstanding  # 3
    assert all(p.generated_tokens < p.request.output_tokens for p in [*inside, *waiting])  # 4
    assert all(p.generated_tokens >= 1 for p in members)  # 4
    assert all((p.first_token_s >= 0) == (p.generated_tokens > 0) for p in waiting)  # 4
    assert decode.context_tokens == sum(p.fill_tokens for p in decode)  # 5
    due = sum(p.kv_tokens % pool.page_size == 0 for p in decode)
    assert decode.pages_needed(1) == due  # 5


def check_promises(
    state: EngineState, before: Sequence[Progress], after: Sequence[Progress]
) -> None:
    """before, after: the queue at a pass. While adapters take turns, requests whose adapter has no
    turn are passed."""
    adapters = {progress.request.adapter for progress in (*before, *after)} | state.adapters
    if len(adapters) > state.engine.max_loras_per_batch:
        return
    waiting = {*after}
    last_in = max((p.job.arrival for p in before if p not in waiting), default=-1)
    assert not any(p.job.goes_first and p.job.arrival < last_in for p in waiting & {*before})  # 6


def _check_pool(state: EngineState, members: list[Progress]) -> None:
    pool = state.pool
    on_device = members if state.chunked is None else [*members, state.chunked]
    lengths = [p.prefilled_tokens if p is state.chunked else p.kv_tokens for p in on_device]
    alone = sum(
        pool.pages(length - p.tree_tokens) for length, p in zip(lengths, on_device, strict=True)
    )
    assert alone == pool.alone_pages  # 1
    held = alone + pool.tree.locked_tokens // pool.page_size
    assert held == pool.held_pages  # 1
    assert pool.held_pages + pool.evictable_pages <= pool.num_pages  # 1
    _check_tree(pool.tree, on_device, state.engine)


def _check_tree(tree: RadixTree, on_device: list[Progress], engine: Engine) -> None:
    holders = Counter(id(node) for p in on_device if p.node for node in p.node.path())
    nodes = [*tree.nodes()]
    there = [node for node in nodes if node.on_device]
    assert all(node.num_locks == holders[id(node)] for node in nodes)  # 1
    assert tree.locked_tokens == sum(len(node) for node in nodes if node.num_locks)  # 1
    assert tree.evictable_tokens == sum(len(node) for node in there if not node.num_locks)  # 1
    assert all(node.on_device or (node.on_host and not node.num_locks) for node in nodes)  # 1
    assert all(each.on_device for node in there for each in node.path())  # 1
    assert tree.host_tokens == sum(len(node) for node in nodes if node.on_host)  # 1
    assert tree.host_tokens <= (engine.host_tier.num_tokens if engine.host_tier else 0)  # 1
