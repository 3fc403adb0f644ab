"""Which requests were sent to which node, and how far they are: what a router knows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sage_sched.cost import num_steps
from sage_sched.distribution import LengthDistribution
from sage_sched.index import MeanCost
from sage_sched.job import NO_HINTS, Hints
from sage_sched.routing.cluster_view import ClusterView, Floats, Ints
from sage_sched.routing.prefix_index import PrefixIndex
from sage_sched.slo import Promise
from sage_sched.steps import ServerFacts, StepTime, attended_pairs

# An answer of which nothing is known.
_UNKNOWN = LengthDistribution.from_samples([256], "prior")
# How often what is left of an answer is looked at again.
_REFRESH_TOKENS = 64
_FIRST_SLOTS = 256
_NOBODY = -1


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that is to be sent somewhere.

    input_tokens, max_new_tokens: of its prompt, and the cap on its answer.
    distribution: of its answer's length; None if nothing is known.
    keys: of its prompt's blocks (sage_sched.routing.prefix_index). hints: when it is due.
    """

    input_tokens: int
    max_new_tokens: int
    distribution: LengthDistribution | None = None
    keys: Sequence[Hashable] = ()
    hints: Hints = NO_HINTS


class _Known(NamedTuple):
    """Of a request that comes. cached: tokens of its prompt, by node. left: of its answer."""

    request: Newcomer
    cached: Ints
    left: MeanCost


@dataclass(slots=True)
class _Sent:
    slot: int
    left: MeanCost
    input_tokens: int
    cached_tokens: int
    age_tokens: int = 0


class Ledger:
    """Every unfinished request, by node. A router hears of a node's requests from time to time, and
    knows at once what it sends itself."""

    def __init__(self, num_nodes: int, server: ServerFacts) -> None:
        """server: of each node; they are equal."""
        self.num_nodes = num_nodes
        self.prefixes = PrefixIndex(num_nodes, server.kv_pool_tokens)
        self._server = server
        self._sent: list[dict[Hashable, _Sent]] = [{} for _ in range(num_nodes)]
        self._queue_heard_s = np.zeros(num_nodes)
        self._num_queued = np.zeros(num_nodes, np.int64)
        self._num_running = np.zeros(num_nodes, np.int64)
        self._known: _Known | None = None
        self._free: list[int] = []
        # By slot; node is _NOBODY where nobody is.
        self._node: Ints = np.zeros(0, np.int64)
        self._tokens: Ints = np.zeros(0, np.int64)
        self._left_tokens: Floats = np.zeros(0)
        self._exec_s: Floats = np.zeros(0)
        self._due_s: Floats = np.zeros(0)
        self._gain: Floats = np.zeros(0)
        self._is_queued = np.zeros(0, np.bool_)

    def go_by(self, step_time: StepTime) -> None:
        """Steps take so long: those of whatever has been sent as well."""
        self._server = replace(self._server, step_time=step_time)
        for sent in self._sent:
            for each in sent.values():
                self._exec_s[each.slot] = self._prefill_s(each.input_tokens, each.cached_tokens)

    def view(self, request: Newcomer, now_s: float) -> ClusterView:
        """What is known as this request comes."""
        known = self._look_up(request)
        prefill_s = self._prefill_s(request.input_tokens, known.cached)
        promise = Promise.of(request.hints)
        present = np.flatnonzero(self._node != _NOBODY)
        waits = self._waits(present)
        queued = present[waits]
        node, tokens = self._node[present], self._tokens[present]
        queue_age_s = np.maximum(now_s - self._queue_heard_s, 0.0)
        exec_s = self._exec_s[queued]
        waiting_s = np.bincount(self._node[queued], exec_s, minlength=self.num_nodes)
        # Of those that wait, what was worked off since decodes by now.
        worked = np.minimum(queue_age_s / np.maximum(waiting_s, 1e-9), 1.0)
        decoding = np.where(waits, worked[node], 1.0)
        step = self._server.step_time
        step_s: Any = step.decode_request_s + tokens * step.decode_kv_token_s
        decode_s: Any = np.bincount(node, decoding * step_s, minlength=self.num_nodes)
        return ClusterView(
            prefill_s=prefill_s,
            cached_tokens=known.cached,
            input_tokens=request.input_tokens,
            answer_tokens=known.left.index(0),
            ttft_s=promise.ttft_s,
            tpot_s=promise.tpot_s,
            gain=promise.first_weight,
            decode_s=decode_s,
            queue_age_s=queue_age_s,
            node=node,
            tokens=tokens,
            left_tokens=self._left_tokens[present],
            step_s=step_s,
            queue_node=self._node[queued],
            exec_s=exec_s,
            remain_s=self._due_s[queued] - now_s,
            queue_gain=self._gain[queued],
            fixed_s=self._server.step_time.decode_base_s,
        )

    def sent(self, rid: Hashable, node: int, request: Newcomer, now_s: float) -> None:
        """It went there."""
        # Until now nothing was there that could be worked off.
        if not self._num_queued[node]:
            self._queue_heard_s[node] = now_s
        known = self._look_up(request)
        cached_tokens = int(known.cached[node])
        prefill_s = self._prefill_s(request.input_tokens, cached_tokens)
        promise = Promise.of(request.hints)
        slot = self._slot()
        self._sent[node][rid] = _Sent(slot, known.left, request.input_tokens, cached_tokens)
        self._node[slot] = node
        self._tokens[slot] = request.input_tokens
        self._left_tokens[slot] = known.left.index(0)
        self._exec_s[slot] = prefill_s
        self._due_s[slot] = now_s + promise.ttft_s
        self._gain[slot] = promise.first_weight
        self._is_queued[slot] = True
        self._num_queued[node] += 1
        self.prefixes.add(node, request.keys)
        self._known = None

    def grown(self, rid: Hashable, node: int, age_tokens: int, now_s: float) -> None:
        """Its answer has so many tokens now."""
        sent = self._sent[node].get(rid)
        if sent is None or age_tokens <= sent.age_tokens:
            return
        self._leaves_queue(sent.slot, node, now_s)
        sent.age_tokens = age_tokens
        self._tokens[sent.slot] = sent.input_tokens + age_tokens
        self._left_tokens[sent.slot] = sent.left.index(age_tokens)

    def ended(self, rid: Hashable, node: int, now_s: float) -> None:
        """It is gone, answered or not."""
        sent = self._sent[node].pop(rid, None)
        if sent is not None:
            self._leaves_queue(sent.slot, node, now_s)
            self._num_running[node] -= self._num_running[node] > 0
            self._node[sent.slot] = _NOBODY
            self._free.append(sent.slot)

    def report(self, node: int, ages: Mapping[Hashable, int], now_s: float) -> None:
        """A node says which requests it has, and how many tokens their answers have."""
        for rid in [rid for rid in self._sent[node] if rid not in ages]:
            self.ended(rid, node, now_s)
        for rid, age_tokens in ages.items():
            self.grown(rid, node, age_tokens, now_s)
        self._queue_heard_s[node] = now_s

    def running(self, node: int, num_requests: int, now_s: float) -> None:
        """A node says how many of its requests have their first token, but not which. Those sent
        there first are taken to be these."""
        if num_requests > self._num_running[node]:
            self._queue_heard_s[node] = now_s
        self._num_running[node] = num_requests

    def num_unfinished(self) -> list[int]:
        """By node."""
        return [len(sent) for sent in self._sent]

    def num_waiting(self) -> list[int]:
        """Of these, without a first token as far as is known."""
        present = np.flatnonzero(self._node != _NOBODY)
        waiting = self._node[present[self._waits(present)]]
        return [int(n) for n in np.bincount(waiting, minlength=self.num_nodes)]

    def _waits(self, present: Ints) -> NDArray[np.bool_]:
        """Which of these slots have no first token."""
        node, waits = self._node[present], self._is_queued[present]
        num_told = np.bincount(node[~waits], minlength=self.num_nodes)
        num_more = self._num_running - num_told
        untold = np.flatnonzero(num_more > 0)
        if not len(untold):
            return waits
        is_queued = self._is_queued.copy()
        for number in untold:
            # In the order in which they were sent.
            slots = (sent.slot for sent in self._sent[number].values())
            oldest = islice((slot for slot in slots if is_queued[slot]), int(num_more[number]))
            is_queued[[*oldest]] = False
        return is_queued[present]

    def _leaves_queue(self, slot: int, node: int, now_s: float) -> None:
        if self._is_queued[slot]:
            self._is_queued[slot] = False
            self._num_queued[node] -= 1
            self._queue_heard_s[node] = now_s

    def _look_up(self, request: Newcomer) -> _Known:
        """Once for a request, though it is picked for and then sent."""
        if self._known is None or self._known.request is not request:
            # The last token is always computed.
            most_tokens = request.input_tokens - 1
            cached = np.minimum(self.prefixes.cached_tokens(request.keys), most_tokens)
            self._known = _Known(request, cached, self._left(request))
        return self._known

    def _prefill_s(self, input_tokens: int, cached_tokens: Any) -> Floats:
        step = self._server.step_time
        new_tokens: Any = input_tokens - cached_tokens
        pairs = attended_pairs(cached_tokens, new_tokens)
        return np.asarray(
            step.prefill_request_s + new_tokens * step.prefill_token_s + pairs * step.prefill_pair_s
        )

    def _left(self, request: Newcomer) -> MeanCost:
        return MeanCost(
            request.distribution or _UNKNOWN,
            num_steps,
            input_tokens=request.input_tokens,
            max_tokens=request.max_new_tokens,
            interval_tokens=_REFRESH_TOKENS,
        )

    def _slot(self) -> int:
        if not self._free:
            used = len(self._node)
            more = max(_FIRST_SLOTS, used)
            self._free = list(range(used + more - 1, used - 1, -1))
            self._node = np.append(self._node, np.full(more, _NOBODY))
            self._tokens = np.append(self._tokens, np.zeros(more, np.int64))
            self._left_tokens = np.append(self._left_tokens, np.zeros(more))
            self._exec_s = np.append(self._exec_s, np.zeros(more))
            self._due_s = np.append(self._due_s, np.zeros(more))
            self._gain = np.append(self._gain, np.zeros(more))
            self._is_queued = np.append(self._is_queued, np.zeros(more, np.bool_))
        return self._free.pop()
