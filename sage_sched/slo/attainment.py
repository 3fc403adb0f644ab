"""How well promises to requests were kept, in all and by class."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from sage_sched.job import Hints
from sage_sched.slo.tdg import Promise

METRICS = ("ttft", "tpot")


@dataclass(slots=True)
class Tally:
    """The requests of one class.

    num_good: how many met all their promises. num_met: how many met the promise of a metric, by
    METRICS. gained, ideal: what their tokens were worth, and could have been.
    """

    num_requests: int = 0
    num_good: int = 0
    num_met: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METRICS, 0))
    gained: float = 0.0
    ideal: float = 0.0

    @property
    def tdg_ratio(self) -> float:
        """The share of the ideal gain; 1 if that is 0."""
        return self.gained / self.ideal if self.ideal else 1.0


class Attainment:
    """How well promises were kept; requests without one do not count.

    tallies: by class. Metrics have SGLang's names (sglang/benchmark/goodput.py) and, as there, take
    a request's mean time per output token; TDG takes each token's own time.
    """

    def __init__(self) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._total = Tally()

    def add(
        self, hints: Hints, ttft_s: float, last_s: float, num_tokens: int, num_next_on_time: int
    ) -> None:
        """Count a request that is done, with at least one token.

        ttft_s, last_s: from its arrival to its first and last token. num_next_on_time: how many of
        its other tokens were on time.
        """
        if not hints.has_slo:
            return
        promise = Promise.of(hints)
        tpot_s = (last_s - ttft_s) / max(1, num_tokens - 1)
        met = {"ttft": ttft_s <= promise.ttft_s, "tpot": tpot_s <= promise.tpot_s}
        for tally in (self._total, self.tallies[hints.slo_class]):
            tally.num_requests += 1
            tally.num_good += all(met.values())
            for name, is_met in met.items():
                tally.num_met[name] += is_met
            tally.gained += promise.gained(met["ttft"], num_next_on_time)
            tally.ideal += promise.ideal(num_tokens)

    def metrics(self, duration_s: float) -> dict[str, Any]:
        """The metrics by SGLang's names, shares in [0, 1]; empty if no request had a promise.

        duration_s: of the run, for request_goodput.
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
