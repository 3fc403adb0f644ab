"""Describes the facts that a router sees when a request arrives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.distribution import Floats

Ints = NDArray[np.int64]


class ClusterView(NamedTuple):
    """Facts in columns: a view of 64 nodes and thousands of requests takes a few array operations.

    The request at each node, shape (nodes,):

    prefill_s: seconds to prefill the uncached part of its prompt.
    cached_tokens: the cached part of its prompt.

    The request:

    input_tokens, answer_tokens: the length of its prompt, and the predicted length of its answer.
    ttft_s, tpot_s: seconds until the deadline of its first token, and per further token; inf: no
        deadline.
    gain: the value of its first token if it is on time, above 0.

    Each node, shape (nodes,):

    decode_s: the seconds that its decoding requests add to one step.
    queue_age_s: seconds since the node last reported its requests without a first token, or since
        the first of them came if that is later.

    Each unfinished request, shape (requests,):

    node: its node.
    tokens: its prompt and its answer so far, as known.
    left_tokens: the predicted rest of its answer.
    step_s: the seconds that it adds to a decode step.

    Each request without a first token, shape (queued,):

    queue_node: its node.
    exec_s: the seconds of its prefill.
    remain_s: seconds until the deadline of its first token; below 0: late.
    queue_gain: the value of its first token, as gain.

    All nodes:

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
        """Return, by node, the sum of a column of the unfinished requests; without a column, their
        number."""
        return np.bincount(self.node, values, minlength=self.num_nodes).astype(np.float64)

    def by_queue(self, values: Floats) -> Floats:
        """Return, by node, the sum of a column of the requests without a first token."""
        return np.bincount(self.queue_node, values, minlength=self.num_nodes).astype(np.float64)
