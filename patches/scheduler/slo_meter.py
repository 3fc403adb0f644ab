"""How far requests get what they were promised, for /server_info and /metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from patches.carrier import decode_stamp
from patches.engine_types import Batch, Req
from patches.scheduler.metrics import SchedulerMetrics
from patches.series import Series
from sage_sched.job import Job
from sage_sched.slo.attainment import Attainment
from sage_sched.slo.tdg import Promise


@dataclass(slots=True)
class Seen:
    """Of a request that was promised something: came_s, when it came; ttft_s and last_s, from then
    to its first and latest token, num_tokens so far, and how many but the first were on time."""

    promise: Promise
    came_s: float
    ttft_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    num_next_on_time: int = 0


class SloMeter:
    """One scheduler's: tokens count as they come out of a step, before they go to the client. The
    clock is read for these numbers alone."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._attainment = Attainment()
        self._started_s: float | None = None

    def arrived(self, req: Req, job: Job) -> Seen | None:
        """What is to be kept of a new request, if it was promised anything."""
        if not job.hints.has_slo:
            return None
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s = now_s
        came_s = decode_stamp(req.sampling_params.custom_params, now_s)
        return Seen(Promise.of(job.hints), came_s)

    def stepped(self, batch: Batch) -> None:
        """A batch's results are in."""
        if self._started_s is None:
            return
        now_s = time.monotonic()
        for req in batch.reqs:
            if (seen := req.sage.seen) is not None:
                self._look(req, seen, now_s - seen.came_s)

    def _look(self, req: Req, seen: Seen, age_s: float) -> None:
        num_tokens = len(req.output_ids)
        for token in range(seen.num_tokens + 1, num_tokens + 1):
            if token == 1:
                seen.ttft_s = age_s
            else:
                seen.num_next_on_time += age_s <= seen.promise.due_s(token, seen.ttft_s)
            seen.last_s = age_s
        seen.num_tokens = num_tokens
        if req.finished():
            req.sage.seen = None  # under overlap it is in one more batch
            if num_tokens and not isinstance(req.finished_reason, FINISH_ABORT):
                self._add(req.sage.job, seen)

    def _add(self, job: Job, seen: Seen) -> None:
        self._attainment.add(
            job.hints, seen.ttft_s, seen.last_s, seen.num_tokens, seen.num_next_on_time
        )
        if (series := self._metrics.series()) is not None:
            self._export(series, job.hints.slo_class)

    def _export(self, series: Series, slo_class: str) -> None:
        """Bring the series of a class up to date."""
        tally = self._attainment.tallies[slo_class]
        series.set("slo_requests", tally.num_requests, slo_class=slo_class)
        series.set("slo_good_requests", tally.num_good, slo_class=slo_class)
        for metric, num_met in {"all": tally.num_good, **tally.num_met}.items():
            share = num_met / tally.num_requests
            series.set("slo_attainment", share, slo_class=slo_class, metric=metric)
        series.set("tdg_ratio", tally.tdg_ratio, slo_class=slo_class)

    def stats(self) -> dict[str, Any]:
        """For /server_info: since the first request that was promised anything."""
        started_s = self._started_s
        return self._attainment.metrics(0.0 if started_s is None else time.monotonic() - started_s)
