"""Implements GoRouting (ProServe, Algorithm 2), which fills nodes up to the limit that deadlines
set, to leave room on others."""

from __future__ import annotations

import numpy as np

from bench.policies.cluster_view import ClusterView
from bench.policies.router import Router
from sage_sched.distribution import Floats


class GoRouting(Router):
    """Picks among the nodes where a request adds almost the most gain.

    It takes the least loaded of the nearly idle ones. If none is nearly idle, it takes the most
    loaded that is not full. If all are full, it takes the least loaded. If the request adds no gain
    on any node, it draws one at random.

    A node's gain is the gain of its waiting first tokens that will be on time. Each is assumed to
    come after all waiting prefills of the node (section 4.3, eq. 8).

    The paper gives no numbers for its thresholds; other values are no better on recordings.

    alpha: a node is a candidate above this share of the best one's gain.
    mu: a node is lightly loaded below this share of the deadline of the first token.
    lambda_: a node is full above this share of that deadline, the request included.
    """

    alpha: float = 0.95
    mu: float = 0.3
    lambda_: float = 0.7

    def pick(self, view: ClusterView) -> int:
        added = gains(view, joined=True) - gains(view, joined=False)
        if not added.max() > 0:
            return int(self._generator.integers(view.num_nodes))
        load_s = waiting_s(view)
        is_candidate = added >= self.alpha * added.max()
        is_light = is_candidate & (load_s < self.mu * view.ttft_s)
        if is_light.any():
            return int(np.argmin(np.where(is_light, load_s, np.inf)))
        fits = is_candidate & (load_s + view.prefill_s <= self.lambda_ * view.ttft_s)
        if fits.any():
            return int(np.argmax(np.where(fits, load_s, -np.inf)))
        return int(np.argmin(np.where(is_candidate, load_s, np.inf)))

    def pick_pair(self, prefill: ClusterView, decode: ClusterView) -> tuple[int, int]:
        """Return the prefill node as in pick, and the decode node with the most free memory. Decode
        nodes have equal pools."""
        return self.pick(prefill), int(np.argmin(decode.by_node(decode.tokens)))


def gains(view: ClusterView, *, joined: bool) -> Floats:
    """Return the value of the first tokens that wait at each node and come in time, shape (nodes,).

    All prefills take `budget / (budget - fixed)` times their seconds, because each step of the
    budget has a fixed part. A step may take until the first deadline that can be met, or the TPOT
    of the new request, but at least twice the fixed part.

    joined: as if the new request waited at each node too.
    """
    in_time = view.remain_s >= view.exec_s + view.fixed_s
    budget_s = np.full(view.num_nodes, view.tpot_s)
    np.minimum.at(budget_s, view.queue_node[in_time], view.remain_s[in_time])
    work_s = view.by_queue(view.exec_s)
    if joined:
        can_be = view.ttft_s >= view.prefill_s + view.fixed_s
        budget_s = np.where(can_be, np.minimum(budget_s, view.ttft_s), budget_s)
        work_s = work_s + view.prefill_s
    budget_s = np.maximum(budget_s, 2 * view.fixed_s)
    # As a share, which is 1 for an unlimited budget.
    share = 1 - np.divide(view.fixed_s, budget_s, out=np.zeros(len(work_s)), where=budget_s > 0)
    done_s = np.maximum(work_s / share + view.decode_s - view.queue_age_s, 0.0)
    is_on_time = done_s[view.queue_node] <= view.remain_s
    gained = view.by_queue(view.queue_gain * is_on_time)
    return gained + view.gain * (done_s <= view.ttft_s) if joined else gained


def waiting_s(view: ClusterView) -> Floats:
    """Return ProServe's ESTIMATEEXEC, shape (nodes,): the seconds of waiting prefills and of
    decoding requests, less the time since the node's last report."""
    return np.maximum(view.by_queue(view.exec_s) + view.decode_s - view.queue_age_s, 0.0)
