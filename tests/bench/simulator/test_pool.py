"""The KV pool and its radix tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.pool import KvPool
from bench.simulator.radix_tree import HostTier, RadixTree
from bench.simulator.request import Progress
from sage_sched.job import Job
from tests.bench.simulator.traffic import request

DOCUMENT, OTHER = 1, 2


def progress(stream: int, num_tokens: int, more: int = 0) -> Progress:
    """Return a request of a document, and of `more` tokens of its own."""
    spans = ((stream, 0, num_tokens), (99, 0, more))[: 1 + (more > 0)]
    asked = request(0.0, num_tokens + more, 5, spans=spans)
    return Progress(asked, stream, Job(stream, num_tokens + more, 5, None, 0))


def prefill(pool: KvPool, asked: Progress) -> int:
    """All of it in one step; how many tokens were computed."""
    pool.enter(asked, pool.cached(asked))
    computed = asked.request.input_tokens - asked.tree_tokens
    pool.hold(pool.pages(asked.request.input_tokens) - asked.tree_tokens // pool.page_size)
    pool.publish(asked, asked.request.input_tokens)
    asked.job.grow(1)
    return computed


def test_the_leaf_used_longest_ago_goes_first() -> None:
    tree = RadixTree(1)
    for stream in (DOCUMENT, OTHER):
        tree.insert([(stream, 0, 10)])
    tree.insert([(DOCUMENT, 0, 10), (7, 0, 3)])
    tree.match([(OTHER, 0, 10)])
    tree.evict(1)  # the three behind the document
    assert tree.match([(DOCUMENT, 0, 10), (7, 0, 3)])[1] == 10
    tree.evict(1)  # OTHER, as the document has just been asked for
    assert tree.match([(OTHER, 0, 10)])[1] == 0
    assert tree.evictable_tokens == 10


def test_the_kv_of_the_session_that_comes_back_last_goes_first() -> None:
    rates = {"soon": 0.1, "late": 0.01, "": 0.0}
    tree = RadixTree(1)
    tree.rate = rates.__getitem__
    for number, session in enumerate(rates):
        tree.insert([(number, 0, 10)], session)
    assert tree.kept_for() == dict.fromkeys(rates, 10)
    tree.evict(1)
    assert tree.kept_for() == {"soon": 10, "late": 10}
    rates["soon"] = 0.0  # it stays away
    tree.evict(1)
    assert tree.kept_for() == {"late": 10}


def test_a_branch_that_a_session_has_left_loses_its_owner() -> None:
    tree = RadixTree(1)
    tree.insert([(DOCUMENT, 0, 10), (7, 0, 3), (8, 0, 4)], "a")
    tree.insert([(DOCUMENT, 0, 10), (9, 0, 5)], "b")
    assert tree.kept_for() == {"a": 7, "b": 15}
    tree.evict(4)  # the branch that it left last is gone, the one before is still there
    tree.insert([(DOCUMENT, 0, 8), (11, 0, 6)], "a")
    assert tree.kept_for() == {"a": 14, "b": 7, "": 3}


@pytest.mark.parametrize("writes_back", [False, True])
def test_evicted_kv_comes_back_from_host_memory(writes_back: bool) -> None:
    pool = KvPool(40, 1, HostTier(60, writes_back))
    first, other = progress(DOCUMENT, 30), progress(OTHER, 25)
    prefill(pool, first)
    assert pool.tree.host_tokens == (0 if writes_back else 30)
    pool.leave(first)
    assert prefill(pool, other) == 25
    assert (pool.held_pages, pool.evictable_pages) == (25, 0)
    assert pool.tree.take_waited() == (30 if writes_back else 0)
    pool.leave(other)
    again = progress(DOCUMENT, 30, more=2)
    assert (pool.found_tokens(again), pool.cached(again).host_tokens) == (30, 30)
    assert prefill(pool, again) == 2
    assert pool.tree.take_waited() == 30 + 25 * writes_back
    assert pool.cached(again).host_tokens == 0


_SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


@given(_SEQUENCES, st.sampled_from([1, 4]), st.lists(st.integers(0, 40), max_size=5))
def test_a_tree_finds_the_longest_common_beginning(
    sequences: list[list[tuple[int, int]]], page: int, evicted: list[int]
) -> None:
    """No memory of its own: the longest common beginning with any sequence that it was given."""
    tree = RadixTree(page)
    known: list[list[tuple[int, int]]] = []
    streams: dict[tuple[tuple[int, int], ...], int] = {}
    for parts in sequences:
        spans = []
        for number, (label, length) in enumerate(parts):
            before = (*parts[:number], (label, 0))
            spans.append((streams.setdefault(before, len(streams)), 0, length))
        tokens = [(s, i) for s, first, end in spans for i in range(first, end)]
        tokens = tokens[: len(tokens) // page * page]
        best = max((_common(tokens, other) for other in known), default=0)
        assert tree.match(spans)[1] == best // page * page
        tree.insert(spans)
        assert tree.match(spans)[1] == len(tokens)
        known.append(tokens)
    total = sum(len(node) for node in tree.nodes())
    pages = {tuple(tokens[:n]) for tokens in known for n in range(page, len(tokens) + 1, page)}
    assert tree.evictable_tokens == total == page * len(pages)
    for num_tokens in evicted:
        tree.evict(num_tokens)
        assert tree.evictable_tokens == sum(len(node) for node in tree.nodes())


def _common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return number
    return min(len(one), len(other))
