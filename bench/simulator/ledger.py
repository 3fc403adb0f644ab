"""Keeps a router's knowledge: which requests were sent to which node, and their progress."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bench.policies.cluster_view import ClusterView, Ints
from bench.simulator.prefix_index import PrefixIndex
from sage_sched.distribution import UNKNOWN, Floats, LengthDistribution
from sage_sched.index import MeanCost
from sage_sched.job import NO_HINTS, Hints
from sage_sched.slo import Deadlines
from sage_sched.steps import ServerFacts, num_steps

# The predicted rest of an answer is computed anew after this many tokens.
_REFRESH_TOKENS = 64
_FIRST_SLOTS = 256
# The node of a free slot.
_NO_NODE = -1
# An unfinished request. gain: the value of its first token if it is on time.
_SLOT = np.dtype(
    [(name, np.int64) for name in ("node", "input_tokens", "cached_tokens", "age_tokens")]
    + [(name, np.float64) for name in ("left_tokens", "due_s", "gain")]
    + [("is_queued", np.bool_)]
)


@dataclass(frozen=True)
class Newcomer:
    """A request that has to be sent to a node.

    input_tokens, max_new_tokens: the length of its prompt, and the cap on its answer.
    distribution: its answer's predicted length; None if unknown.
    keys: the keys of its prompt's blocks (bench.simulator.prefix_index).
    hints: its hints, which give its deadlines.
    """

    input_tokens: int
    max_new_tokens: int
    distribution: LengthDistribution | None = None
    keys: Sequence[Hashable] = ()
    hints: Hints = NO_HINTS

    @cached_property
    def left(self) -> MeanCost:
        """The mean number of tokens to come, by age."""
        return MeanCost(
            self.distribution or UNKNOWN,
            num_steps,
            input_tokens=self.input_tokens,
            max_tokens=self.max_new_tokens,
            interval_tokens=_REFRESH_TOKENS,
        )


class Ledger:
    """Every unfinished request, by node. A router gets reports of a node's requests from time to
    time, and knows at once which requests it sends itself."""

    def __init__(self, num_nodes: int, server: ServerFacts) -> None:
        """server: the facts of each node; nodes are equal."""
        self.num_nodes = num_nodes
        self._prefixes = PrefixIndex(num_nodes, server.kv_pool_tokens)
        self._server = server
        # By node: the slot of each request, and the predicted rest of its answer.
        self._sent: list[dict[Hashable, tuple[int, MeanCost]]] = [{} for _ in range(num_nodes)]
        self._queue_heard_s = np.zeros(num_nodes)
        self._slots = np.zeros(0, _SLOT)
        self._free: list[int] = []

    def view(self, request: Newcomer, now_s: float) -> ClusterView:
        cached_tokens = self._cached_tokens(request)
        deadlines = Deadlines.of(request.hints)
        present = np.flatnonzero(self._slots["node"] != _NO_NODE)
        sent = self._slots[present]
        node, waits = sent["node"], sent["is_queued"]
        queued = sent[waits]
        exec_s = self._prefill_s(queued["input_tokens"], queued["cached_tokens"])
        waiting_s = np.bincount(queued["node"], exec_s, minlength=self.num_nodes)
        queue_age_s = np.maximum(now_s - self._queue_heard_s, 0.0)
        # The share of the waiting requests that have been prefilled since, and now decode.
        worked = np.minimum(queue_age_s / np.maximum(waiting_s, 1e-9), 1.0)
        decoding = np.where(waits, worked[node], 1.0)
        step = self._server.step_time
        tokens = sent["input_tokens"] + sent["age_tokens"]
        step_s = step.decode_request_s + tokens * step.decode_kv_token_s
        decode_s: Any = np.bincount(node, decoding * step_s, minlength=self.num_nodes)
        return ClusterView(
            prefill_s=self._prefill_s(request.input_tokens, cached_tokens),
            cached_tokens=cached_tokens,
            input_tokens=request.input_tokens,
            answer_tokens=request.left.index(0),
            ttft_s=deadlines.ttft_s,
            tpot_s=deadlines.tpot_s,
            gain=deadlines.first_weight,
            decode_s=decode_s,
            queue_age_s=queue_age_s,
            node=node,
            tokens=tokens,
            left_tokens=sent["left_tokens"],
            step_s=step_s,
            queue_node=queued["node"],
            exec_s=exec_s,
            remain_s=queued["due_s"] - now_s,
            queue_gain=queued["gain"],
            fixed_s=step.decode_base_s,
        )

    def sent(self, rid: Hashable, node: int, request: Newcomer, now_s: float) -> None:
        if not np.any(self._slots["is_queued"] & (self._slots["node"] == node)):
            self._queue_heard_s[node] = now_s  # no earlier work can have been done
        deadlines = Deadlines.of(request.hints)
        slot = self._free_slot()
        self._slots[slot] = (
            node,
            request.input_tokens,
            self._cached_tokens(request)[node],
            0,
            request.left.index(0),
            now_s + deadlines.ttft_s,
            deadlines.first_weight,
            True,
        )
        self._sent[node][rid] = slot, request.left
        self._prefixes.add(node, request.keys)

    def grown(self, rid: Hashable, node: int, age_tokens: int, now_s: float) -> None:
        slot, left = self._sent[node].get(rid, (_NO_NODE, None))
        if left is None or age_tokens <= self._slots["age_tokens"][slot]:
            return
        self._leaves_queue(slot, node, now_s)
        self._slots["age_tokens"][slot] = age_tokens
        self._slots["left_tokens"][slot] = left.index(age_tokens)

    def ended(self, rid: Hashable, node: int, now_s: float) -> None:
        """Remove a request, answered or not."""
        slot, _ = self._sent[node].pop(rid, (_NO_NODE, None))
        if slot != _NO_NODE:
            self._leaves_queue(slot, node, now_s)
            self._slots["node"][slot] = _NO_NODE
            self._free.append(slot)

    def report(self, node: int, ages: Mapping[Hashable, int], now_s: float) -> None:
        """Take in a node's report of its requests, and of the tokens of their answers."""
        for rid in [rid for rid in self._sent[node] if rid not in ages]:
            self.ended(rid, node, now_s)
        for rid, age_tokens in ages.items():
            self.grown(rid, node, age_tokens, now_s)
        self._queue_heard_s[node] = now_s

    def _leaves_queue(self, slot: int, node: int, now_s: float) -> None:
        if self._slots["is_queued"][slot]:
            self._slots["is_queued"][slot] = False
            self._queue_heard_s[node] = now_s

    def _cached_tokens(self, request: Newcomer) -> Ints:
        """Return the cached tokens of its prompt, by node. The last token is always computed."""
        return np.minimum(self._prefixes.cached_tokens(request.keys), request.input_tokens - 1)

    def _prefill_s(self, input_tokens: Any, cached_tokens: Any) -> Floats:
        new_tokens = input_tokens - cached_tokens
        return np.asarray(self._server.step_time.prompt_s(cached_tokens, new_tokens))

    def _free_slot(self) -> int:
        if not self._free:
            used = len(self._slots)
            more = np.zeros(max(_FIRST_SLOTS, used), _SLOT)
            more["node"] = _NO_NODE
            self._slots = np.append(self._slots, more)
            self._free = list(range(len(self._slots) - 1, used - 1, -1))
        return self._free.pop()
