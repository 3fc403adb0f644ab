"""Finds routers for several engines by name: stock ones, and one by predicted cost."""

from __future__ import annotations

import numpy as np

from bench.policies.cluster_view import ClusterView
from bench.policies.gorouting import GoRouting, waiting_s
from bench.policies.router import Router
from sage_sched.distribution import Floats


class RoundRobin(Router):
    """Picks one node after the other (SGLang's round_robin)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._num_picks = 0

    def pick(self, view: ClusterView) -> int:
        self._num_picks += 1
        return (self._num_picks - 1) % view.num_nodes


class TotalRequests(Router):
    """Picks the node with the fewest unfinished requests (SGLang's total_requests, routers' least
    load)."""

    def pick(self, view: ClusterView) -> int:
        return int(np.argmin(view.by_node()))


class PowerOfTwo(Router):
    """Draws two random nodes, and picks the one with fewer unfinished requests (routers'
    power_of_two)."""

    def pick(self, view: ClusterView) -> int:
        two = self._generator.permutation(view.num_nodes)[:2]
        return int(two[np.argmin(view.by_node()[two])])


class TotalTokens(Router):
    """Picks the node with the fewest tokens of unfinished requests; breaks ties by their number
    (SGLang's total_tokens)."""

    def pick(self, view: ClusterView) -> int:
        return _least(view.by_node(view.tokens), view.by_node())


class CacheAware(Router):
    """SGLang's router with its own defaults.

    If one node has both 64 more requests than another and half as many again, it picks the node
    with the fewest requests. Otherwise it picks the node with the longest cached prefix, if that is
    at least 0.3 of the prompt. If the prefix is shorter, it picks the node with the fewest requests
    (SGLang: with the smallest tree).
    """

    _most_more, _most_times, _least_share = 64, 1.5, 0.3

    def pick(self, view: ClusterView) -> int:
        num_requests = view.by_node()
        most, least = float(num_requests.max()), float(num_requests.min())
        balanced = most - least <= self._most_more or most <= self._most_times * least
        if balanced and view.cached_tokens.max() > self._least_share * view.input_tokens:
            return _least(-view.cached_tokens.astype(np.float64), num_requests)
        return int(np.argmin(num_requests))


class MinLoad(Router):
    """Picks the node with the fewest seconds of waiting prefills and of a decode step (ProServe's
    Min-Load, which knows as much as GoRouting does)."""

    def pick(self, view: ClusterView) -> int:
        return int(np.argmin(waiting_s(view)))


class PredictedCost(Router):
    """Picks the node where the request costs all requests together the fewest seconds.

    While the uncached part of its prompt is prefilled, the request and all others at the node wait.
    Then each of the others makes the request's steps longer, while both are predicted to run. The
    request makes their steps longer too, by an amount assumed to be equal. So a cached prefix
    attracts a request only by the time that it saves.
    """

    def pick(self, view: ClusterView) -> int:
        together = np.minimum(view.left_tokens, view.answer_tokens)
        slower_s = view.by_node(2 * together * view.step_s)
        return int(np.argmin((1 + view.by_node()) * view.prefill_s + slower_s))


def _least(first: Floats, second: Floats) -> int:
    return int(np.lexsort((second, first))[0])


_BY_NAME: dict[str, type[Router]] = {
    "predicted-cost": PredictedCost,
    "gorouting": GoRouting,
    "round_robin": RoundRobin,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
    "power_of_two": PowerOfTwo,
    "cache_aware": CacheAware,
    "min-load": MinLoad,
}
ROUTERS = tuple(_BY_NAME)


def router_named(name: str, seed: int = 0) -> Router:
    """Return the router of this name. Raises ValueError, which lists the known ones."""
    try:
        return _BY_NAME[name](seed)
    except KeyError:
        raise ValueError(f"unknown dispatcher {name!r}, known: {', '.join(ROUTERS)}") from None
