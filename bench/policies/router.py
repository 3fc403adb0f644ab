"""What picks the engine of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from bench.policies.cluster_view import ClusterView


class Router(ABC):
    """Picks a node. Keeps nothing but what it counts or draws itself."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)

    @abstractmethod
    def pick(self, view: ClusterView) -> int:
        """The node for the request of the view."""

    def pick_pair(self, prefill: ClusterView, decode: ClusterView) -> tuple[int, int]:
        """Where nodes either prefill or decode: one of each. In the view of those that prefill a
        request is unfinished until its first token comes, in the other one until its last."""
        return self.pick(prefill), self.pick(decode)
