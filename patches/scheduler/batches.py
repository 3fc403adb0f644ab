"""Refuses batches that cannot be done in time, and reports on the others."""

from __future__ import annotations

from typing import Any

from patches.engine_types import Req, Scheduler
from patches.listener import Listener
from patches.messages import too_late_in_abort
from patches.scheduler.overload import send_refusal
from sage_sched.scheduler import Scheduler as Core


class BatchGate(Listener):
    """The batches of one scheduler. All ranks decide alike, by the broadcast clock."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def turns_away(self, req: Req) -> bool:
        """Return whether a request's batch cannot be done in time. If so, its client has been told,
        and the caller must release the request."""
        state, job = self._scheduler.sage, req.sage.job
        core: Core = state.core
        if state.is_stock or req.output_ids or req.finished():
            return False
        if not core.limits.batches.may_refuse(job):
            return False
        mode: str = self._scheduler.server_args.disaggregation_mode
        if mode != "null" or not state.calibration.are_own:
            return False
        try:
            state.overload.look_up(req)
            late = core.limits.batches.refuses(job, state.server, core.now_s)
            reason = None if late is None else too_late_in_abort(late)
        except Exception:
            state.failures.count("predict the end of a batch")
            return False
        if reason is None:
            return False
        req.sage.refusal = reason["message"]
        send_refusal(self._scheduler, req, reason)
        return True

    def stats(self) -> dict[str, Any]:
        state = self._scheduler.sage
        core: Core = state.core
        found = core.limits.batches.reports(state.server, core.now_s)
        return {"batches": [report._asdict() for report in found]} if found else {}
