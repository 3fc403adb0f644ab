"""Decides when refused requests may come back."""

from __future__ import annotations

import math

# OpenAI's clients ignore a longer Retry-After.
_LEAST_S, _MOST_S = 1.0, 60.0


class Returns:
    """Lets refused requests come back one after another, as the server has time for them."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def after_s(self, now_s: float, wait_s: float, own_s: float) -> float:
        """Return in how many seconds the latest refused request may come back.

        wait_s: the time until the server is free for it, if no other request comes back before.
        own_s: the time for which it keeps the server busy.
        """
        return_s = min(max(now_s + max(wait_s, _LEAST_S), self._next_s), now_s + _MOST_S)
        self._next_s = return_s + own_s
        return return_s - now_s
