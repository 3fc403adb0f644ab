"""Refuses requests on arrival at a scheduler, answers dry runs, and compares predicted times with
real ones."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from patches.carrier import decode_asked, is_dry_run
from patches.engine_types import Batch, Req, Scheduler
from patches.listener import Listener
from patches.messages import ENDED, add_return, answer_in_abort, ends_in_queue, in_abort
from patches.scheduler import view
from patches.scheduler.metrics import left_s
from patches.scheduler.request import PredictedTimes
from sage_sched.overload import OverloadConfig
from sage_sched.overload.returns import Returns
from sage_sched.overload.work import unfilled_tokens
from sage_sched.scheduler import Scheduler as Core

logger = logging.getLogger(__name__)

# The ratios cover this many of the latest requests.
_NUM_COMPARED = 500
# The work left is summed at most once in this time: it takes 10 ms for a thousand requests.
_SUMMED_S = 2.0
_NO_TIMES: dict[str, str | int] = {
    "type": "abort",
    "status_code": 503,
    "message": "no times are predicted for this request, or overload.enabled is false",
}


class OverloadGate(Listener):
    """Protects one scheduler from overload. All ranks decide alike, by the broadcast clock. The
    local clock is read only to compare predicted times with real ones."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mode: str = scheduler.server_args.disaggregation_mode
        self.num_refused = {"ttft": 0, "ttlt": 0, "queued_tokens": 0}
        self._read_s = -math.inf
        # A call and a time, and how many requests of the queue are of that call.
        self._looked_at: tuple[tuple[float | None, float], int] = (None, -math.inf), 0
        # When prompt tokens were counted, of how many requests of the queue, and how many.
        self._counted = -math.inf, 0, 0
        self._compared = {
            name: deque[tuple[float, float]](maxlen=_NUM_COMPARED) for name in ("ttft", "ttlt")
        }
        self._returns, self._summed_s, self._each_s = Returns(), -math.inf, 0.0

    @property
    def _config(self) -> OverloadConfig:
        core: Core = self._scheduler.sage.core
        return core.limits.overload.config

    @property
    def _is_on(self) -> bool:
        return self._config.enabled

    def turns_away(self, req: Req) -> bool:
        """Return whether a request that begins to wait is refused, or was a dry run. If so, its
        client has been told the reason, and the caller must release the request. A request that
        waits again is never refused."""
        if req.sage.predicted_times is not None or req.output_ids:
            return False
        if req.to_finish is not None or req.finished():
            return False
        is_dry = is_dry_run(req.sampling_params.custom_params)
        reason, overflow = (_NO_TIMES if is_dry else None), None
        if self._config.may_refuse:
            try:
                overflow = self._overflow(req)
                reason = reason or overflow
                if self._is_on and (is_dry or reason is None):
                    reason = self._reason(req, is_dry=is_dry, is_full=overflow is not None)
            except Exception:
                self._scheduler.sage.failures.count("predict a wait")
        if reason is None:
            return False
        self.num_refused["queued_tokens"] += reason is overflow
        send_refusal(self._scheduler, req, reason)
        return True

    def turned_away(self, abort: AbortReq, req: Req) -> None:
        """Note why a request does not run, and tell its client when to come back, also if SGLang's
        own limits end it."""
        if ends_in_queue(abort) and not is_dry_run(req.sampling_params.custom_params):
            req.sage.refusal = abort.finished_reason["message"]
            add_return(abort, self._return_s)

    def _return_s(self) -> float:
        """Return when the latest request that SGLang turns away may come back, by the work left.
        The local clock is enough, because this decides about no request."""
        now_s = time.monotonic()
        if now_s - self._summed_s > _SUMMED_S:
            try:
                seconds, number = left_s(self._scheduler)
            except Exception:
                self._scheduler.sage.failures.count("predict a wait")
                seconds, number = 0.0, 1
            self._summed_s, self._each_s = now_s, seconds / max(1, number)
        return self._returns.after_s(now_s, self._each_s, self._each_s)

    def _overflow(self, req: Req) -> dict[str, str | int] | None:
        """Return the answer of a request if too many prompt tokens wait; None if not."""
        scheduler, most = self._scheduler, self._config.max_queued_tokens
        has_waited = req.time_stats.wait_queue_entry_time > 0
        if not most or has_waited or self._mode != "null":
            return None
        # Done for all, since cached tokens do not count once others wait behind it.
        self.look_up(req)
        call = decode_asked(req.sampling_params.custom_params)
        if not self._any_waits(call and call[1]):
            return None
        core, queued = scheduler.sage.core, self._queued_tokens()
        if not core.limits.overload.overflows(req.sage.job, queued):
            return None
        message = f"{queued} prompt tokens wait, and overload.max_queued_tokens is {most}."
        return {"type": "abort", "status_code": ENDED, "message": message}

    def _queued_tokens(self) -> int:
        """Return how many prompt tokens wait. As in _any_waits, each newcomer adds the tokens that
        have come since the newcomer before."""
        scheduler = self._scheduler
        now_s, queue, chunked = scheduler.sage.core.now_s, scheduler.waiting_queue, []
        counted_s, number, tokens = self._counted
        if counted_s != now_s or len(queue) < number:  # a pass may have come between
            chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
            number = tokens = 0
        tokens += sum(unfilled_tokens(req.sage.job) for req in (*queue[number:], *chunked))
        self._counted = now_s, len(queue), tokens
        return tokens

    def _reason(self, req: Req, *, is_dry: bool, is_full: bool) -> dict[str, str | int] | None:
        """Return the answer of a request that is turned away; None if it is not."""
        state, job = self._scheduler.sage, req.sage.job
        if is_dry and not job.is_predicted:
            return _NO_TIMES
        call = decode_asked(req.sampling_params.custom_params)
        came_s = call and call[1]
        core: Core = state.core
        now_s = core.now_s
        self.look_up(req)
        if now_s != self._read_s:  # once per broadcast
            self._read_s = now_s
            scheduler = self._scheduler
            for other in (*scheduler.running_batch.reqs, *view.held(scheduler)):
                other.sage.job.grow(len(other.output_ids))
        waits = self._any_waits(came_s)
        acts = state.calibration.are_own and self._mode == "null"
        acts = acts and (waits or self._joins_others(came_s))
        newcomer = core.newcomer(job, state.server)
        if is_dry:
            late = core.limits.overload.would_refuse(job, newcomer, waits) if acts else None
            return answer_in_abort(newcomer, late, self._mode, is_full=is_full)
        refusal = core.refuses(job, newcomer, may_refuse=acts, others_wait=waits)
        if refusal is not None:
            self.num_refused[refusal.metric] += 1
            return in_abort(refusal)
        was_sampled = core.limits.overload.was_sampled
        req.sage.predicted_times = PredictedTimes(
            newcomer.ttft_s, newcomer.ttlt_s, time.monotonic(), acts and waits, was_sampled
        )
        return None

    def look_up(self, req: Req) -> None:
        """Look a new request up in the cache, as a plan does (sage_sched.scheduler), once."""
        state, job = self._scheduler.sage, req.sage.job
        if job.was_looked_up or job.keeps_memory or view.only_decodes(self._scheduler):
            return
        kv = view.ServerKv(self._scheduler, {job: req})
        found = kv.cached(job)
        job.shared_tokens = kv.shared_tokens(job) if found[0] else 0
        state.core.found(job, *found, state.server)

    def _any_waits(self, came_s: float | None) -> bool:
        """Whether a request of another API call than that of came_s waits. Otherwise an idle server
        would refuse a long list of prompts again and again.

        The prompts of a long list come one after another. Until the next broadcast the queue only
        grows, so each of them looks only at the requests that have come since the one before.
        """
        queue, about = self._scheduler.waiting_queue, (came_s, self._scheduler.sage.core.now_s)
        if self._looked_at[0] != about:
            self._looked_at = about, 0
        for place in range(self._looked_at[1], len(queue)):
            if _is_of_other_call(queue[place], came_s):
                return True
            self._looked_at = about, place + 1
        return False

    def _joins_others(self, came_s: float | None) -> bool:
        """Whether a request of this call joins a batch of other calls' requests at once. The latest
        to join decides, because the prompts of a list start together."""
        queue, running = self._scheduler.waiting_queue, self._scheduler.running_batch.reqs
        return not queue and bool(running) and _is_of_other_call(running[-1], came_s)

    def stepped(self, batch: Batch, result: Any) -> None:
        if not self._is_on:
            return
        for req in batch.reqs:
            # Under overlap a request that has ended is in one more batch.
            if len(req.output_ids) == 1 and not req.sage.has_ended:
                self._compare("ttft", req)

    def ended(self, req: Req, was_aborted: bool) -> None:
        if not was_aborted:
            self._compare("ttlt", req)
            self._learn_trust(req)

    def _learn_trust(self, req: Req) -> None:
        """Compare predicted times with real ones by the broadcast clock, and log if refusing stops
        or begins again."""
        times, state = req.sage.predicted_times, self._scheduler.sage
        if not self._is_on or times is None or not times.others_waited:
            return
        overload = state.core.limits.overload
        was_lost = overload.trust.is_lost
        sampled = times.was_sampled
        overload.answered(req.sage.job, times.ttlt_s, state.core.now_s, was_sampled=sampled)
        if overload.trust.is_lost and not was_lost:
            logger.warning(
                "no request is refused for now, because answers take less than a third of their "
                "predicted times (sage:predicted_time_ratio)"
            )
        elif was_lost and not overload.trust.is_lost:
            logger.info("late requests are refused again, because predicted times fit")

    def _compare(self, metric: str, req: Req) -> None:
        predicted_times: PredictedTimes | None = req.sage.predicted_times
        # A prefill server sees no last token, and a decode server no wait for the first.
        if predicted_times is not None and self._mode == "null":
            predicted_s = predicted_times.ttft_s if metric == "ttft" else predicted_times.ttlt_s
            self._compared[metric].append((time.monotonic() - predicted_times.at_s, predicted_s))

    def ratios(self) -> dict[str, float]:
        """Return, by metric, the sum of real times divided by the sum of predicted ones, over the
        latest requests."""
        return {
            name: sum(real for real, _ in both) / sum(predicted for _, predicted in both)
            for name, both in self._compared.items()
            if both
        }

    def stats(self) -> dict[str, Any]:
        if not self._config.may_refuse:
            return {}
        trust = self._scheduler.sage.core.limits.overload.trust
        return {
            "overload": {
                "num_refused": self.num_refused,
                "real_to_predicted": self.ratios(),
                "sampled_good_share": trust.good_share,
                "is_trusted": not trust.is_lost,
            }
        }


def send_refusal(scheduler: Scheduler, req: Req, reason: dict[str, Any]) -> None:
    """Tell a request's client that the request ends for this reason. The caller releases it."""
    req.time_stats.trace_ctx.abort(abort_info=reason)
    scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)


def _is_of_other_call(req: Req, came_s: float | None) -> bool:
    asked = decode_asked(req.sampling_params.custom_params)
    return came_s is None or asked is None or asked[1] != came_s
