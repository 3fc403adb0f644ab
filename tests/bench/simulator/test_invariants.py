"""The invariants notice damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.simulator.run import make_node
from bench.simulator.state import EngineState
from tests.bench.simulator.invariants import BrokenInvariantError, check_state
from tests.bench.simulator.traffic import CHECKED, CONFIG, SMALL, mixed


def leak_page(state: EngineState) -> None:
    state.pool.alone_pages += 1


def lose_cache(state: EngineState) -> None:
    state.pool.tree.evictable_tokens -= state.pool.page_size


def lose_lock(state: EngineState) -> None:
    next(node for node in state.pool.tree.nodes() if node.num_locks).num_locks += 1


def lose_waiting(state: EngineState) -> None:
    del state.queue[0]


def double(state: EngineState) -> None:
    state.queue.append(next(iter(state.decode)))


def overrun(state: EngineState) -> None:
    state.decode.step += 1000


@pytest.mark.parametrize(
    ("damage", "number"),
    [
        (leak_page, "1"),
        (lose_cache, "1"),
        (lose_lock, "1"),
        (lose_waiting, "3"),
        (double, "3"),
        (overrun, "[145]"),
    ],
)
def test_damage_is_noticed(damage: Callable[[EngineState], None], number: str) -> None:
    node = make_node(SMALL, "sage", CONFIG, CHECKED, lambda _: None)
    for index, request in enumerate(mixed(60, 100.0, 1)):
        node.submit(request, index)
    # All come within 1.5 s.
    while not (node.now_s > 1.5 and node.num_outstanding < 55 and len(node.state.decode) > 1):
        node.advance(node.now_s + 0.1)
    assert len(node.state.queue)
    assert node.state.pool.evictable_pages
    check_state(node.state, node.num_outstanding)
    damage(node.state)
    with pytest.raises(BrokenInvariantError, match=f"invariant {number} "):
        check_state(node.state, node.num_outstanding)
