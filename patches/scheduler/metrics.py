"""Reports a scheduler's series on /metrics, every two seconds."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict
from typing import Any

from patches.engine_types import Req, Scheduler
from patches.listener import Listener
from patches.scheduler import view
from patches.scheduler.why_waiting import by_reason
from patches.series import Series
from sage_sched.backlog import backlog_s
from sage_sched.job import Job
from sage_sched.plan import PreemptionMode

logger = logging.getLogger(__name__)

# Often enough for a scrape every five seconds. With a thousand waiting requests, one report takes
# 10 ms.
_INTERVAL_S = 2.0
# More requests could run if all slots are taken while this share of the KV pool is free. A warning
# is logged if this many reports in a row find that.
_FREE_SHARE, _NUM_BOUND = 0.4, 30


class SchedulerMetrics(Listener):
    """The series of one scheduler. Only the rank that reports SGLang's metrics has any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._due_s = 0.0
        self._policies: dict[str, None] = {}
        self._series: Series | None = None
        self._num_bound = 0

    def series(self) -> Series | None:
        """Return the series; None if the server has no /metrics, or another rank reports for this
        one."""
        context = self._scheduler.metrics_collector_context
        if self._series is None and context.current_scheduler_metrics_enabled:
            self._series = Series(context.collector.labels)
        return self._series

    def polled(self) -> None:
        """Update the series. Never raises."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _INTERVAL_S
        try:
            waiting = by_reason(self._scheduler)
            self._watch_slots(bool(waiting["slots"]))
            if (series := self.series()) is not None:
                self._report(series, waiting)
        except Exception:
            self._due_s = float("inf")
            logger.exception("series of sage-sched on /metrics are no longer brought up to date")

    def _watch_slots(self, any_lacks_one: bool) -> None:
        """Warn if requests have long waited for a slot while memory is free."""
        scheduler = self._scheduler
        free_share = view.room_tokens(scheduler) / scheduler.max_total_num_tokens
        binds = any_lacks_one and free_share >= _FREE_SHARE
        self._num_bound = self._num_bound + 1 if binds else 0
        if self._num_bound == _NUM_BOUND:
            logger.warning(
                "requests have waited for a slot for a minute while %d %% of the KV pool is free: "
                "raise --max-running-requests, now %d",
                100 * free_share, scheduler.max_running_requests,
            )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        return {"slots_bind": self._num_bound >= _NUM_BOUND}

    def _report(self, series: Series, waiting: Mapping[str, Sequence[Req]]) -> None:
        state = self._scheduler.sage
        for policy in self._policies:
            series.set("policy_info", 0.0, policy=policy)
        self._policies[state.settings.schedule_policy] = None
        series.set("policy_info", 1.0, policy=state.settings.schedule_policy)
        self._report_load(series, waiting)
        self._report_moves(series)
        stats = state.stats()
        series.count("switches_total", stats["num_switches"])
        series.count("policy_errors_total", stats["num_policy_errors"])
        series.count("unpredicted_requests_total", stats["num_predicted"].get("none", 0))
        series.count("recomputed_tokens_total", state.jobs.recomputed_tokens)
        series.count("passes_total", stats["num_passes"])
        series.count("pass_seconds_total", stats["num_passes"] * stats["mean_pass_ms"] / 1e3)
        series.set("headroom_steps", stats["headroom_steps"])
        for metric, number in state.overload.num_refused.items():
            series.count("refused_total", number, metric=metric)
        for metric, ratio in state.overload.ratios().items():
            series.set("predicted_time_ratio", ratio, metric=metric)
        trust = state.core.limits.overload.trust
        if trust.good_share is not None:
            series.set("refused_sample_good_ratio", trust.good_share)
        series.set("refusing_trusted", float(not trust.is_lost))
        for kind, error in stats["step_time"]["errors"].items():
            series.set("step_time_error_ratio", error, kind=kind)
        for whose, found in stats["gaps"].items():
            for name in ("mean", "p99", "p999", "longest"):
                gap_s = found.get(f"{name}_ms", math.nan) / 1e3
                series.set("token_gap_seconds", gap_s, request=whose, statistic=name)
        for name, seconds in asdict(state.calibration.step_time).items():
            series.set("step_time_seconds", seconds, coefficient=name.removesuffix("_s"))

    def _report_moves(self, series: Series) -> None:
        preemption = self._scheduler.sage.last_preemption
        num_preemptions = {} if preemption is None else preemption.num_preemptions
        for short, reason in ((True, "out_of_memory"), (False, "waiting")):
            for way, name in (
                (PreemptionMode.SWAP, "swap"),
                (PreemptionMode.RECOMPUTE, "recompute"),
            ):
                number = num_preemptions.get((short, way), 0)
                series.count("preemptions_total", number, reason=reason, way=name)
        moves = {} if preemption is None else preemption.stats()
        series.count("moved_bytes_total", moves.get("swapped_bytes", 0))
        series.count("moved_seconds_total", moves.get("swapped_s", 0.0))
        series.set("host_used_ratio", 0.0 if preemption is None else preemption.used_ratio())

    def _report_load(self, series: Series, waiting: Mapping[str, Sequence[Req]]) -> None:
        scheduler = self._scheduler
        waits_s: list[float] = []
        for reason, reqs in waiting.items():
            series.set("waiting_requests", len(reqs), reason=reason)
            of_reason_s = waited_s(reqs)
            series.set("oldest_wait_seconds", max(of_reason_s, default=0.0), reason=reason)
            waits_s += of_reason_s
        series.set("mean_wait_seconds", sum(waits_s) / max(1, len(waits_s)))
        series.set("swapped_requests", len(view.in_host_memory(scheduler)))
        series.set("backlog_seconds", left_s(scheduler)[0])


def left_s(scheduler: Scheduler) -> tuple[float, int]:
    """Return the predicted time until nine in ten of the present requests are done, and their
    number."""
    running = [_as_it_is(scheduler, req) for req in scheduler.running_batch.reqs]
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    jobs = [req.sage.job for req in (*view.waiting(scheduler), *chunked)]
    jobs += running
    share = scheduler.new_token_ratio_tracker.current
    return backlog_s(jobs, share, scheduler.sage.server), len(jobs)


def _as_it_is(scheduler: Scheduler, req: Req) -> Job:
    """Return a copy of a running request's Job at its current age. The original must stay as it is,
    because ranks that do not report do not update theirs here."""
    job: Job = copy(req.sage.job)
    job.watch = None  # the copy is in no queue, and must not notify one
    job.grow(len(req.output_ids))
    return job


def waited_s(waiting: Sequence[Req]) -> list[float]:
    """Return how long each request has waited since it arrived or was last preempted, by SGLang's
    own stamp."""
    now_s = time.perf_counter()
    stamps = [req.time_stats.wait_queue_entry_time for req in waiting]
    return [max(0.0, now_s - stamp_s) for stamp_s in stamps if stamp_s > 0]
