"""Measures the rate that a server sustains, and the time of a request on an idle server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bench.simulator.run_metrics import decoded_share
from bench.workloads.arrivals import poisson_arrivals

if TYPE_CHECKING:
    from bench.engines.server.client import Answer
    from bench.simulator.result import Served


# The first fifth of a saturated run does not count: long answers gather in memory only with time.
_WARM_UP = 0.2
# The arrival rate is between these two multiples of the capacity. At a lower rate the server might
# not be saturated: if the answers of the first fifth happen to be long, a server that keeps up
# seems to complete a tenth less. At a higher rate policies that order by length would serve only
# short requests.
_LEAST_OVERLOAD, _MOST_OVERLOAD = 1.15, 1.4
_MOST_RUNS = 6
# A burst of this size gives the first rate to try.
PILOT_REQUESTS = 300


class Saturation(NamedTuple):
    """The rate that a server sustains.

    capacity: requests (or sessions) per second that it completes if more than that arrive for a
        long time.
    service_s: the mean time from a request's first token to its last in that state.
    """

    capacity: float
    service_s: float

    @classmethod
    def measured(cls, served: Served, num_arrivals: int, until_s: float) -> Self:
        """Measure a run in which the server has a queue until until_s.

        The capacity is tokens per second, prompts and answers together, divided by the mean tokens
        per request. It counts tokens instead of completions, because a window in which few long
        answers end tells little about their rate. An answer's tokens count as evenly spread over
        its decoding.

        num_arrivals: the number of requests or, if these are steps of sessions, of sessions.
        """
        first_s, last_s = served.arrival_s + served.ttft_s, served.arrival_s + served.ttlt_s

        def tokens_by(at_s: float) -> float:
            share = np.clip(decoded_share(at_s, first_s, last_s), 0, 1)
            tokens = served.input_tokens + 1 + (served.answer_tokens - 1) * share
            return float(tokens[first_s <= at_s].sum())

        from_s = _WARM_UP * until_s
        tokens_per_s = (tokens_by(until_s) - tokens_by(from_s)) / (until_s - from_s)
        per_arrival = float((served.input_tokens + served.answer_tokens).sum()) / num_arrivals
        return cls(tokens_per_s / per_arrival, float((served.ttlt_s - served.ttft_s).mean()))


def sustained(
    serve: Callable[[NDArray[np.float64]], Served], num_arrivals: Callable[[float], int]
) -> Saturation:
    """Measure the rate that a server sustains, by runs with faster arrivals.

    serve: runs requests that arrive at these times (ascending, in seconds).
    num_arrivals: returns the number of requests to send at a rate per second. With more requests
        the result is more certain.
    """
    burst = serve(np.zeros(PILOT_REQUESTS))
    until_s = float((burst.arrival_s + burst.ttft_s).max())
    rate_per_s = Saturation.measured(burst, PILOT_REQUESTS, until_s).capacity
    for _ in range(_MOST_RUNS):
        number = num_arrivals(rate_per_s)
        arrivals_s = poisson_arrivals(number, seed=1) / rate_per_s
        found = Saturation.measured(serve(arrivals_s), number, float(arrivals_s[-1]))
        overload = rate_per_s / found.capacity
        if _LEAST_OVERLOAD <= overload <= _MOST_OVERLOAD:
            break
        rate_per_s = 1.25 * found.capacity
    return found


class UnloadedTime(NamedTuple):
    """The time of a request alone on a server whose step times are unknown:
    base_s + input tokens * per_input_token_s + output tokens * per_output_token_s."""

    base_s: float
    per_input_token_s: float
    per_output_token_s: float

    def seconds(self, input_tokens: int, output_tokens: int) -> float:
        """Return the time to the last token of a request of these lengths."""
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
        """Fit requests that were answered one at a time: least squares of the relative error, with
        no negative coefficient."""
        measured = np.array([answer.ttlt_s for answer in answers])
        terms = np.array([[1.0, a.input_tokens, a.output_tokens] for a in answers])
        coefficients, _ = nnls(terms / measured[:, None], np.ones(measured.size))
        return cls(*coefficients.tolist())
