"""What an engine sustains: the yardstick of arrival rates."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray


class Saturation(NamedTuple):
    """A server that always has a queue.

    capacity: requests/s that it then sustains. service_s: from a request's first token to its last,
    on average.
    """

    capacity: float
    service_s: float

    @classmethod
    def measured(cls, first_s: NDArray[np.float64], last_s: NDArray[np.float64]) -> Self:
        """From a burst of requests that were all sent at 0: when they had their first and last
        tokens.

        The capacity is counted until the last request got its first token: up to then the server
        had a queue, after that it only drains. A request under way counts by the share of its
        decoding that was done.
        """
        full_until_s = float(first_s.max())
        decode_s = last_s - first_s
        until_s = np.minimum(last_s, full_until_s) - first_s
        done = np.divide(until_s, decode_s, out=np.ones_like(decode_s), where=decode_s > 0)
        return cls(float(done.sum()) / full_until_s, float(decode_s.mean()))
