"""What a router knows of a cluster as a request comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats

Ints = NDArray[np.int64]


class ClusterView(NamedTuple):
    """Columns: one look at 64 nodes and thousands of requests takes a few array operations.

    Of the request, by node, shape (nodes,):
    prefill_s: what is not cached of its prompt takes there. cached_tokens: of its prompt.
    Of the request:
    input_tokens, answer_tokens: of its prompt, and of its answer as foreseen. ttft_s, tpot_s: until
        its first token is due, and each further one; inf: whenever. gain: what its first token is
        worth if it is on time, above 0.
    Of each node, shape (nodes,):
    decode_s: what those that decode there add to one step. queue_age_s: since those that have no
        first token yet were heard of last, or there are any.
    Of each unfinished request, shape (requests,):
    node: where it is. tokens: its prompt and what is known of its answer. left_tokens: of its
        answer, as foreseen. step_s: what it adds to a decode step.
    Of those of them that have no first token yet, shape (queued,):
    queue_node: where. exec_s: their prefill. remain_s: until it is due; below 0: late. queue_gain:
        as gain.
    fixed_s: of every step.
    """

    prefill_s: Floats
    cached_tokens: Ints
    input_tokens: int
    answer_tokens: float
    ttft_s: float
    tpot_s: float
    gain: float
    decode_s: Floats
    queue_age_s: Floats
    node: Ints
    tokens: Ints
    left_tokens: Floats
    step_s: Floats
    queue_node: Ints
    exec_s: Floats
    remain_s: Floats
    queue_gain: Floats
    fixed_s: float

    def among(self, nodes: Sequence[int]) -> ClusterView:
        """Of these nodes alone, numbered in this order; nothing unfinished is on the others."""
        if len(nodes) == self.num_nodes:
            return self
        chosen = np.array(nodes, np.int64)
        number = np.zeros(self.num_nodes, np.int64)
        number[chosen] = np.arange(len(chosen))
        return self._replace(
            prefill_s=self.prefill_s[chosen],
            cached_tokens=self.cached_tokens[chosen],
            decode_s=self.decode_s[chosen],
            queue_age_s=self.queue_age_s[chosen],
            node=number[self.node],
            queue_node=number[self.queue_node],
        )

    @property
    def num_nodes(self) -> int:
        return len(self.prefill_s)

    def by_node(self, values: Floats | Ints | None = None) -> Floats:
        """Sums of a column of the unfinished requests; without one, their number."""
        return np.bincount(self.node, values, minlength=self.num_nodes).astype(np.float64)

    def by_queue(self, values: Floats) -> Floats:
        """Sums of a column of those that have no first token."""
        return np.bincount(self.queue_node, values, minlength=self.num_nodes).astype(np.float64)
