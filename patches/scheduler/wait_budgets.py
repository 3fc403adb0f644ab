"""Ends requests that have waited longer than their clients allow (x-llm-d-inference-ttl)."""

from __future__ import annotations

import heapq
import time

from sglang.srt.managers.io_struct import AbortReq

from patches.engine_types import Req, Scheduler
from patches.listener import Listener
from patches.messages import ENDED
from patches.scheduler import view


class WaitBudgets(Listener):
    """The requests of one scheduler that have a budget of waiting until they first run. Only the
    broadcasting rank's clock counts."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # When each budget is used up, on this rank's clock.
        self._ends: list[tuple[float, int, Req]] = []

    def arrived(self, req: Req) -> None:
        job = req.sage.job
        if (budget_ms := job.hints.max_wait_ms) is not None:
            ends_s = req.sage.waits.came_s + budget_ms / 1e3
            heapq.heappush(self._ends, (ends_s, job.arrival, req))

    def polled(self) -> AbortReq | None:
        """Return the abort of a request whose budget is used up, until it has ended."""
        now_s = time.monotonic()
        while self._ends and self._ends[0][0] <= now_s:
            req: Req = self._ends[0][2]
            if self._waits(req) and self._is_alone(req.rid):
                budget_ms = req.sage.job.hints.max_wait_ms
                message = f"The request has waited for {budget_ms:g} ms, as long as it may."
                req.sage.refusal = message
                reason = {"type": "abort", "status_code": ENDED, "message": message}
                return AbortReq(rid=req.rid, abort_message=message, finished_reason=reason)
            heapq.heappop(self._ends)
        return None

    def _waits(self, req: Req) -> bool:
        state = req.sage
        return not (state.has_ended or state.is_preempted or state.waits.since_s is None)

    def _is_alone(self, rid: str) -> bool:
        """Whether an abort ends this request alone. Trap: SGLang aborts all requests whose ids
        begin with a given id, and clients choose ids."""
        scheduler = self._scheduler
        others = (*view.waiting(scheduler), *scheduler.running_batch.reqs)
        return sum(req.rid.startswith(rid) for req in others) <= 1
