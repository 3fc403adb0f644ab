"""The KV pool and its radix tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.radix_tree import RadixTree


def test_leaves_go_by_their_sessions_rate_and_their_last_use() -> None:
    rates = {"soon": 0.1, "late": 0.01, "": 0.0}
    tree = RadixTree(1)
    tree.insert([(1, 0, 10)])
    tree.insert([(1, 0, 10), (2, 0, 5)])
    tree.insert([(3, 0, 10)], "late")
    tree.insert([(4, 0, 10)], "soon")
    tree.insert([(3, 0, 8), (5, 0, 4)], "late")  # it has left the last two tokens
    assert tree.kept_for() == {"": 17, "soon": 10, "late": 12}
    tree.match([(1, 0, 10), (2, 0, 5)])
    tree.evict(1)
    assert tree.kept_for() == {"": 15, "soon": 10, "late": 12}  # those two
    tree.rate = rates.__getitem__
    tree.evict(6)
    assert tree.kept_for() == {"soon": 10, "late": 12}
    rates["soon"] = 0.0  # it stays away
    tree.evict(1)
    assert tree.kept_for() == {"late": 12}


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
