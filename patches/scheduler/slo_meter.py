"""Measures SLO attainment."""

from __future__ import annotations

import time
from typing import Any

from patches.carrier import came_at_s
from patches.engine_types import Batch, Req
from patches.listener import Listener
from patches.scheduler.metrics import SchedulerMetrics
from patches.scheduler.request import TokenTimes
from sage_sched.job import Hints
from sage_sched.slo import Attainment, Deadlines


class SloMeter(Listener):
    """Measures SLO attainment of one scheduler. A token counts when its step ends, before it is
    sent to the client. No decision uses these readings of the clock."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._attainment = Attainment()
        self._started_s: float | None = None  # when the first request with an SLO came

    def arrived(self, req: Req) -> None:
        hints = req.sage.job.hints
        if not hints.has_slo:
            return
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        came_s = came_at_s(req.sampling_params.custom_params, now_s)
        req.sage.token_times = TokenTimes(Deadlines.of(hints), came_s)

    def stepped(self, batch: Batch, result: Any) -> None:
        if self._started_s is not None:
            for req in batch.reqs:
                _count(req)

    def ended(self, req: Req, was_aborted: bool) -> None:
        _count(req)  # a prefill server's first token comes without a step
        times: TokenTimes | None = req.sage.token_times
        req.sage.token_times = None
        if times is not None and times.num_tokens and not was_aborted:
            self._add(req.sage.job.hints, times)

    def _add(self, hints: Hints, times: TokenTimes) -> None:
        self._attainment.add(
            hints, times.ttft_s, times.last_s, times.num_tokens, times.num_next_on_time
        )
        if (series := self._metrics.series()) is None:
            return
        slo_class, tally = hints.slo_class, self._attainment.tallies[hints.slo_class]
        series.set("slo_requests", tally.num_requests, slo_class=slo_class)
        series.set("slo_good_requests", tally.num_good, slo_class=slo_class)
        for metric, num_met in {"all": tally.num_good, **tally.num_met}.items():
            share = num_met / tally.num_requests
            series.set("slo_attainment", share, slo_class=slo_class, metric=metric)
        series.set("tdg_ratio", tally.tdg_ratio, slo_class=slo_class)

    def stats(self) -> dict[str, Any]:
        """Return the attainment since the first request with an SLO."""
        now_s = time.monotonic()
        return {"slo": self._attainment.metrics(now_s - (self._started_s or now_s))}


def _count(req: Req) -> None:
    """Count the tokens that have come since the last call."""
    times: TokenTimes | None = req.sage.token_times
    if times is None:
        return
    age_s, num_tokens = time.monotonic() - times.came_s, len(req.output_ids)
    for token in range(times.num_tokens + 1, num_tokens + 1):
        if token == 1:
            times.ttft_s = age_s
        else:
            times.num_next_on_time += age_s <= times.deadlines.due_s(token)
        times.last_s = age_s
    times.num_tokens = num_tokens
