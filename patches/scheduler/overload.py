"""Refuses requests on arrival at a scheduler, and compares predicted times with real ones."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from sglang.srt.managers.io_struct import AbortReq

from patches.carrier import decode_asked
from patches.engine_types import Batch, Req, Scheduler
from patches.listener import Listener
from patches.messages import in_abort
from patches.scheduler.request import PredictedTimes
from sage_sched.overload import Refusal

# The latest requests that the ratios cover.
_NUM_COMPARED = 500


class OverloadGate(Listener):
    """Overload protection of one scheduler. All ranks decide alike; the clock is read for ratios
    alone."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_refused = {"ttft": 0, "ttlt": 0}
        self._compared = {
            name: deque[tuple[float, float]](maxlen=_NUM_COMPARED) for name in self.num_refused
        }

    @property
    def _is_on(self) -> bool:
        return bool(self._scheduler.sage.limits.overload.config.enabled)

    def refuses(self, req: Req) -> bool:
        """Return whether a request that begins to wait is refused. A request that waits again was
        admitted before. If it is refused, its client gets the refusal, and SGLang releases it."""
        state = self._scheduler.sage
        if not self._is_on or req.sage.predicted_times is not None or req.output_ids:
            return False
        if req.to_finish is not None or req.finished():
            return False
        try:
            refusal = self._refusal(req)
            reason = None if refusal is None else in_abort(refusal)
        except Exception:
            state.failures.count("predict a wait")
            return False
        if refusal is None:
            return False
        self.num_refused[refusal.metric] += 1
        req.time_stats.trace_ctx.abort(abort_info=reason)
        self._scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=reason), req)
        return True

    def _refusal(self, req: Req) -> Refusal | None:
        state, job = self._scheduler.sage, req.sage.job
        now_s = state.jobs.now_s
        newcomer = state.limits.overload.newcomer(job, state.policy, state.server, now_s)
        call = decode_asked(req.sampling_params.custom_params)
        found = PredictedTimes(newcomer.ttft_s, newcomer.ttlt_s, time.monotonic(), call and call[1])
        req.sage.predicted_times = found
        refusal: Refusal | None = state.limits.overload.refuses(
            job,
            newcomer,
            now_s,
            any_waits=any(map(found.waits_for, self._scheduler.waiting_queue)),
            knows_steps=state.calibration.source != "shipped",
        )
        return refusal

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
        if predicted_times is not None:
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
        return {"overload": {"num_refused": self.num_refused, "real_to_predicted": self.ratios()}}
