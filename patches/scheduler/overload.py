"""Refuses or degrades requests on arrival at a scheduler, tells routers how long a request would
wait, and compares predicted times with real ones."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from patches.carrier import decode_asked, is_dry_run
from patches.engine_types import Batch, Req, Scheduler
from patches.listener import Listener
from patches.loads import DEGRADED
from patches.messages import answer_in_abort, in_abort, times_ms
from patches.scheduler import queues
from patches.scheduler.request import PredictedTimes
from sage_sched.limits import Limits
from sage_sched.overload import Decision
from sage_sched.policy import Policy

# The ratios cover this many of the latest requests.
_NUM_COMPARED = 500
# How often the outlook is renewed.
_OUTLOOK_S = 0.25
_NO_TIMES: dict[str, str | int] = {
    "type": "abort",
    "status_code": 503,
    "message": "no times are predicted for this request, or overload.enabled is false",
}


class OverloadGate(Listener):
    """Protects one scheduler from overload. All ranks decide alike, by the broadcast clock. The
    local clock is read only to compare predicted times with real ones.

    outlook: the times of a typical request if it came now (/v1/loads); None if unknown.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mode: str = scheduler.server_args.disaggregation_mode
        self.num_refused = {"ttft": 0, "ttlt": 0}
        self.num_degraded = {"cap": 0, "behind": 0}
        self.outlook: dict[str, int] | None = None
        self._looked_s = -math.inf
        self._compared = {
            name: deque[tuple[float, float]](maxlen=_NUM_COMPARED) for name in self.num_refused
        }

    @property
    def _is_on(self) -> bool:
        return bool(self._scheduler.sage.limits.overload.config.enabled)

    def turns_away(self, req: Req) -> bool:
        """Return whether a request that begins to wait is refused, or was a dry run. If so, its
        client has been told the reason, and the caller must release the request. A request that
        waits again is never refused."""
        if req.sage.predicted_times is not None or req.output_ids:
            return False
        if req.to_finish is not None or req.finished():
            return False
        state, is_dry = self._scheduler.sage, is_dry_run(req.sampling_params.custom_params)
        reason, job = _NO_TIMES if is_dry else None, req.sage.job
        as_it_came = job.max_new_tokens, job.level
        if self._is_on:
            try:
                reason = self._reason(req, is_dry=is_dry)
            except Exception:
                state.failures.count("predict a wait")
                if as_it_came != (job.max_new_tokens, job.level):
                    job.max_new_tokens, job.level = as_it_came
                    state.jobs.rank_anew(job)
        if reason is None:
            return False
        req.time_stats.trace_ctx.abort(abort_info=reason)
        self._scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)
        return True

    def _reason(self, req: Req, *, is_dry: bool) -> dict[str, str | int] | None:
        """Return the answer of a request that is turned away; None if it is not."""
        state, job = self._scheduler.sage, req.sage.job
        call = decode_asked(req.sampling_params.custom_params)
        came_s = call and call[1]
        self._grow()
        any_waits = any(
            other.sage.is_of_other_call(came_s) and not other.sage.job.is_behind
            for other in self._scheduler.waiting_queue
        )
        overload, now_s = state.limits.overload, state.jobs.now_s
        about = (job, state.policy, state.server, now_s)
        acts = any_waits and self._knows_steps and self._mode == "null"
        if is_dry:
            if job.distribution is None:
                return _NO_TIMES
            newcomer = overload.newcomer(*about)
            late = overload.would_refuse(job, newcomer) if acts else None
            return answer_in_abort(Decision(newcomer, late, None), self._mode)
        decision = overload.decide(*about, any_waits=acts, knows_steps=self._knows_steps)
        reason = None if decision.refusal is None else in_abort(decision.refusal)
        newcomer = decision.newcomer
        req.sage.predicted_times = PredictedTimes(
            newcomer.ttft_s, newcomer.ttlt_s, time.monotonic(), came_s
        )
        if decision.refusal is not None:
            self.num_refused[decision.refusal.metric] += 1
        elif decision.degraded is not None:
            self._degrade(req, decision.degraded)
        return reason

    def _grow(self) -> None:
        """Bring the ages of running jobs up to date, which predicted times rest on. A pass does so
        only if it plans."""
        scheduler = self._scheduler
        scheduler.sage.jobs.running([*scheduler.running_batch.reqs, *queues.held(scheduler)])

    def _degrade(self, req: Req, action: str) -> None:
        self.num_degraded[action] += 1
        if action == "cap":
            req.sampling_params.max_new_tokens = req.sage.job.max_new_tokens
        req.customized_info = {**(req.customized_info or {}), DEGRADED: [action]}

    @property
    def _knows_steps(self) -> bool:
        return bool(self._scheduler.sage.calibration.source != "shipped")

    def ticked(self, now_s: float) -> None:
        """Renew the outlook from time to time. All ranks do so, because this also renews the
        rows of jobs by which they decide."""
        if not self._is_on:
            self.outlook = None
        elif not 0 <= now_s - self._looked_s < _OUTLOOK_S:
            self._looked_s = now_s
            try:
                self.outlook = self._outlook(now_s)
            except Exception:
                self.outlook = None
                self._scheduler.sage.failures.count("predict a wait")

    def switched(
        self, name: str, policy: Policy, limits: Limits, unfinished: Sequence[Req]
    ) -> None:
        """Forget the outlook of the previous settings: there may be no more ticks to renew it."""
        self.outlook = None

    def _outlook(self, now_s: float) -> dict[str, int] | None:
        state = self._scheduler.sage
        self._grow()
        found = state.limits.overload.typical(state.policy, state.server, now_s)
        if found is None:
            return None
        newcomer, refusal = found
        predicted_ms = times_ms(newcomer, self._mode)
        if self._mode != "null":
            return predicted_ms
        any_waits = any(not req.sage.job.is_behind for req in queues.waiting(self._scheduler))
        late = refusal is not None and any_waits and self._knows_steps
        return {**predicted_ms, "late": int(late)}

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

    def _compare(self, metric: str, req: Req) -> None:
        predicted_times: PredictedTimes | None = req.sage.predicted_times
        # A prefill server sees no last token, and a decode server no wait for the first.
        if predicted_times is not None and self._mode == "null" and not req.sage.job.is_behind:
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
        if not self._is_on:
            return {}
        return {
            "overload": {
                "num_refused": self.num_refused,
                "num_degraded": self.num_degraded,
                "real_to_predicted": self.ratios(),
            }
        }
