"""Guesses which prefixes each node has cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

# Tokens of a block. SGLang shares by token or page; a guess needs less precision.
BLOCK_TOKENS = 64


class PrefixIndex:
    """The blocks of prompts that were sent to each node. Each node keeps as many as fit its KV
    pool, and drops the least recently used. This is a guess: nodes do not report their caches."""

    def __init__(self, num_nodes: int, tokens_per_node: int) -> None:
        self._most_blocks = max(1, tokens_per_node // BLOCK_TOKENS)
        self._used: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_nodes)]

    def cached_tokens(self, keys: Sequence[Hashable]) -> NDArray[np.int64]:
        """Return the cached tokens of a prompt with these keys on each node, shape (nodes,)."""
        num_blocks = [len([*takewhile(used.__contains__, keys)]) for used in self._used]
        return np.array(num_blocks, np.int64) * BLOCK_TOKENS

    def add(self, node: int, keys: Sequence[Hashable]) -> None:
        """Record that a node computes a prompt with these keys."""
        used = self._used[node]
        # In reverse order, so that the end of a prompt is dropped first.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        while len(used) > self._most_blocks:
            used.popitem(last=False)
