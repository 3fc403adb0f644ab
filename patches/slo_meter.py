"""How far requests get what they were promised, for /server_info and /metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from patches.carrier import decode_stamp
from patches.engine_types import Batch, Req, Scheduler
from sage_sched.attainment import Attainment
from sage_sched.job import Job
from sage_sched.tdg import Promise


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

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._attainment = Attainment()
        self._started_s: float | None = None
        self._series: dict[str, Any] | None = None

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
        if self._scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
            self._export(job.hints.slo_class)

    def _export(self, slo_class: str) -> None:
        """Bring the series of a class up to date."""
        gauges = self._series = self._series or _gauges()
        tally, labels = self._attainment.tallies[slo_class], {"slo_class": slo_class}
        gauges["slo_requests"].labels(**labels).set(tally.num_requests)
        gauges["slo_good_requests"].labels(**labels).set(tally.num_good)
        gauges["slo_attainment"].labels(**labels, metric="all").set(
            tally.num_good / tally.num_requests
        )
        for metric, num_met in tally.num_met.items():
            gauges["slo_attainment"].labels(**labels, metric=metric).set(
                num_met / tally.num_requests
            )
        gauges["tdg_ratio"].labels(**labels).set(tally.gained / tally.ideal)

    def stats(self) -> dict[str, Any]:
        """For /server_info: since the first request that was promised anything."""
        started_s = self._started_s
        return self._attainment.metrics(0.0 if started_s is None else time.monotonic() - started_s)


def _gauges() -> dict[str, Any]:
    """Made with the first request that was promised anything, long after SGLang has told
    prometheus_client where its processes meet, which must come before it is imported."""
    from prometheus_client import Gauge

    def gauge(name: str, what: str, *labels: str) -> Any:
        return Gauge(f"sage:{name}", what, ["slo_class", *labels], multiprocess_mode="mostrecent")

    return {
        "slo_requests": gauge("slo_requests", "Requests that were promised anything."),
        "slo_good_requests": gauge(
            "slo_good_requests", "Those that got all of it; request_goodput is its rate."
        ),
        "slo_attainment": gauge("slo_attainment", "Share of requests, by metric.", "metric"),
        "tdg_ratio": gauge("tdg_ratio", "What tokens on time were worth, of what all would be."),
    }
