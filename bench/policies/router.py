"""Defines the interface of routers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from bench.policies.cluster_view import ClusterView


class Router(ABC):
    """Picks the node of a request. It keeps only its own counts and random draws."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    @abstractmethod
    def pick(self, view: ClusterView) -> int:
        """Return the node for the view's request."""

    def pick_pair(self, prefill: ClusterView, decode: ClusterView) -> tuple[int, int]:
        """Return a prefill node and a decode node, if nodes either prefill or decode.

        In the prefill nodes' view a request is unfinished until its first token comes, in the other
        view until its last.
        """
        return self.pick(prefill), self.pick(decode)
