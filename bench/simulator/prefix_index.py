"""Which beginnings of prompts each node has computed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

# Tokens of a block. SGLang shares by the token or page; a guess at where to go needs less.
BLOCK_TOKENS = 64


class PrefixIndex:
    """What was sent to whom, in blocks. Each node keeps as many as fit its KV pool, and forgets
    those that were used longest ago. This is a guess: nobody asks the nodes."""

    def __init__(self, num_nodes: int, tokens_per_node: int) -> None:
        self._most_blocks = max(1, tokens_per_node // BLOCK_TOKENS)
        self._used: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(num_nodes)]

    def cached_tokens(self, keys: Sequence[Hashable]) -> NDArray[np.int64]:
        """How much of a prompt of these keys each node has, shape (nodes,)."""
        num_blocks = [len([*takewhile(used.__contains__, keys)]) for used in self._used]
        return np.array(num_blocks, np.int64) * BLOCK_TOKENS

    def add(self, node: int, keys: Sequence[Hashable]) -> None:
        """A node computes a prompt of these keys now."""
        used = self._used[node]
        # From the end, so that the end of a prompt is forgotten first.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        while len(used) > self._most_blocks:
            used.popitem(last=False)
