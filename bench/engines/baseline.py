"""The yardsticks: what an engine sustains, and what a request takes on one that is idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bench.engines.run_metrics import decoded_share

if TYPE_CHECKING:
    from bench.engines.server.client import Answer


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
        done = decoded_share(full_until_s, first_s, last_s)
        return cls(float(done.sum()) / full_until_s, float((last_s - first_s).mean()))


class UnloadedTime(NamedTuple):
    """On a server whose steps nobody knows:
    base_s + input tokens * per_input_token_s + output tokens * per_output_token_s."""

    base_s: float
    per_input_token_s: float
    per_output_token_s: float

    def seconds(self, input_tokens: int, output_tokens: int) -> float:
        """To the last token of a request of these lengths."""
        return (
            self.base_s
            + input_tokens * self.per_input_token_s
            + output_tokens * self.per_output_token_s
        )

    @property
    def description(self) -> str:
        return (
            f"{self.base_s * 1e3:.0f} ms + {self.per_input_token_s * 1e3:.3f} ms per input token "
            f"+ {self.per_output_token_s * 1e3:.3f} ms per output token"
        )

    @classmethod
    def fitted(cls, answers: Sequence[Answer]) -> UnloadedTime:
        """From requests that were answered one at a time: least squares of the relative error,
        no coefficient below 0."""
        measured = np.array([answer.ttlt_s for answer in answers])
        terms = np.array([[1.0, a.input_tokens, a.output_tokens] for a in answers])
        coefficients, _ = nnls(terms / measured[:, None], np.ones(measured.size))
        return cls(*coefficients.tolist())
