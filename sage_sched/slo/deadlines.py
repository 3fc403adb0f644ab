"""Computes deadlines, the gain of tokens on time (token-level deadline gain; ProServe, section 2),
and the attainment of SLOs, in total and by class."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

from sage_sched.job import Hints

METRICS = ("ttft", "tpot")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of an answer's tokens, and the gain of each token on time.

    ttft_s: seconds from the request's arrival to the deadline of the first token; inf: no deadline.
    tpot_s: seconds from each deadline to the next.
    first_weight, next_weight: the gain of the first token and of each further one, above 0.
    An early token gives the next ones more time, because clients show tokens at an even pace.
    """

    ttft_s: float
    tpot_s: float
    first_weight: float = 1.0
    next_weight: float = 1.0

    @classmethod
    def of(cls, hints: Hints) -> Self:
        ttft_ms, tpot_ms = hints.ttft_slo_ms, hints.tpot_slo_ms
        return cls(
            math.inf if ttft_ms is None else ttft_ms / 1e3,
            math.inf if tpot_ms is None else tpot_ms / 1e3,
            hints.weight * hints.first_token_weight,
            hints.weight,
        )

    def due_s(self, token: int) -> float:
        """Return the deadline of a token (1: the first), in seconds after the request's arrival."""
        return self.ttft_s + (token - 1) * self.tpot_s if token > 1 else self.ttft_s

    def gained(self, first_is_on_time: bool, num_next_on_time: int) -> float:
        """Return the gain of an answer if this many of its further tokens were on time."""
        return self.first_weight * first_is_on_time + self.next_weight * num_next_on_time

    def ideal(self, num_tokens: int) -> float:
        """Return the gain of an answer of num_tokens, at least 1, if all are on time."""
        return self.gained(True, num_tokens - 1)


@dataclass(slots=True)
class Tally:
    """Counts the requests of one class.

    num_good: requests that met all their targets.
    num_met: requests that met the target of a metric, by METRICS.
    gained, ideal: the gain of their tokens, and the gain if all had been on time.
    """

    num_requests: int = 0
    num_good: int = 0
    num_met: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METRICS, 0))
    gained: float = 0.0
    ideal: float = 0.0

    @property
    def tdg_ratio(self) -> float:
        """Return the gain as a share of the ideal gain; 1 if the ideal gain is 0."""
        return self.gained / self.ideal if self.ideal else 1.0


class Attainment:
    """Measures SLO attainment. Requests without an SLO do not count.

    tallies: by class. Metrics have the names of SGLang's goodput.py (sglang/benchmark), and use the
    mean time per output token of a request, as SGLang does. TDG uses the time of each token.
    """

    def __init__(self) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._total = Tally()

    def add(
        self, hints: Hints, ttft_s: float, last_s: float, num_tokens: int, num_next_on_time: int
    ) -> None:
        """Count a finished request with at least one token.

        ttft_s, last_s: from its arrival to its first and last token. num_next_on_time: how many of
            its other tokens were on time.
        """
        if not hints.has_slo:
            return
        deadlines = Deadlines.of(hints)
        tpot_s = (last_s - ttft_s) / max(1, num_tokens - 1)
        met = {"ttft": ttft_s <= deadlines.ttft_s, "tpot": tpot_s <= deadlines.tpot_s}
        for tally in (self._total, self.tallies[hints.slo_class]):
            tally.num_requests += 1
            tally.num_good += all(met.values())
            for name, is_met in met.items():
                tally.num_met[name] += is_met
            tally.gained += deadlines.gained(met["ttft"], num_next_on_time)
            tally.ideal += deadlines.ideal(num_tokens)

    def metrics(self, duration_s: float) -> dict[str, Any]:
        """Return the metrics by SGLang's names, shares in [0, 1]; empty if no request had an SLO.

        duration_s: the duration of the run, for request_goodput.
        """
        total, by_class = self._total, sorted(self.tallies.items())
        num_requests = total.num_requests
        if not num_requests:
            return {}
        return {
            "request_goodput": total.num_good / duration_s if duration_s > 0 else 0.0,
            "slo_attainment": total.num_good / num_requests,
            "slo_attainment_by_metric": {
                name: num_met / num_requests for name, num_met in total.num_met.items()
            },
            "slo_attainment_by_class": {
                name: tally.num_good / tally.num_requests for name, tally in by_class
            },
            "tdg_ratio": total.tdg_ratio,
            "tdg_ratio_by_class": {name: tally.tdg_ratio for name, tally in by_class},
        }
