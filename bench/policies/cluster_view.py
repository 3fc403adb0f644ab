"""What a router knows of a cluster as a request comes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats

Ints = NDArray[np.int64]


class ClusterView(NamedTuple):
    """Columns: one look at 64 nodes and thousands of requests takes a few array operations.

    The request at each node, shape (nodes,):
    prefill_s: what the uncached part of its prompt takes there. cached_tokens: of its prompt.
    The request:
    input_tokens, answer_tokens: of its prompt, and of its answer as predicted. ttft_s, tpot_s:
        until its first token is due, and each further one; inf: no deadline. gain: what its first
        token is worth if it is on time, above 0.
    Each node, shape (nodes,):
    decode_s: what its decoding requests add to one step. queue_age_s: since its requests without a
        first token were last heard of, or since there are any.
    Each unfinished request, shape (requests,):
    node: where it is. tokens: its prompt and its answer so far, as known. left_tokens: of its
        answer, as predicted. step_s: what it adds to a decode step.
    Each of them without a first token, shape (queued,):
    queue_node: where it is. exec_s: of its prefill. remain_s: until its first token is due; below
        0: late. queue_gain: as gain.
    fixed_s: the fixed time of a step.
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

    @property
    def num_nodes(self) -> int:
        return len(self.prefill_s)

    def by_node(self, values: Floats | Ints | None = None) -> Floats:
        """By node, the sum of a column of the unfinished requests; without one, their number."""
        return np.bincount(self.node, values, minlength=self.num_nodes).astype(np.float64)

    def by_queue(self, values: Floats) -> Floats:
        """By node, the sum of a column of the requests without a first token."""
        return np.bincount(self.queue_node, values, minlength=self.num_nodes).astype(np.float64)
