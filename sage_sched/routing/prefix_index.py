"""Which beginnings of prompts each node has computed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

# Tokens of a block. SGLang shares by the token or page; a guess at where to go needs less.
BLOCK_TOKENS = 64


def block_keys(token_ids: Sequence[int], scope: Hashable = None) -> list[Hashable]:
    """A key for each whole block: equal if it and all before it are, in the same scope."""
    keys: list[Hashable] = []
    before = hash(scope)
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        before = hash((before, tuple(token_ids[end - BLOCK_TOKENS : end])))
        keys.append(before)
    return keys


class PrefixIndex:
    """What was sent to whom, in blocks; each node keeps as many as fit its KV pool, and forgets
    those that were used longest ago. A guess: nobody asks the nodes."""

    def __init__(self, num_nodes: int, tokens_per_node: int) -> None:
        self._num_nodes = num_nodes
        self._most_blocks = max(1, tokens_per_node // BLOCK_TOKENS)
        self._used: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_nodes)]
        self._holders: dict[Hashable, int] = {}  # bit n: node n has it

    def cached_tokens(self, keys: Sequence[Hashable]) -> NDArray[np.int64]:
        """Of a prompt of these keys, by node, shape (nodes,)."""
        found = np.zeros(self._num_nodes, np.int64)
        holders = (1 << self._num_nodes) - 1
        for number, key in enumerate(keys):
            left = holders & self._holders.get(key, 0)
            self._note(found, holders & ~left, number)
            holders = left
            if not holders:
                return found
        self._note(found, holders, len(keys))
        return found

    def add(self, node: int, keys: Sequence[Hashable]) -> None:
        """A node computes such a prompt now."""
        used, bit = self._used[node], 1 << node
        # From its end, so that of one prompt the end is forgotten first.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
            self._holders[key] = self._holders.get(key, 0) | bit
        while len(used) > self._most_blocks:
            self._forget(used.popitem(last=False)[0], bit)

    def clear(self, node: int) -> None:
        """A node has forgotten all."""
        for key in self._used[node]:
            self._forget(key, 1 << node)
        self._used[node].clear()

    def _forget(self, key: Hashable, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    @staticmethod
    def _note(found: NDArray[np.int64], nodes: int, num_blocks: int) -> None:
        while num_blocks and nodes:
            lowest = nodes & -nodes
            found[lowest.bit_length() - 1] = num_blocks * BLOCK_TOKENS
            nodes ^= lowest
