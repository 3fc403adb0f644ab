"""Writes what happened to each request and why, as JSON lines (--sage-trace FILE)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from patches.engine_types import Batch, Req, Scheduler
from patches.json_lines import JsonLines
from patches.listener import Listener
from patches.scheduler import view
from patches.scheduler.request import predicted
from sage_sched.job import Job
from sage_sched.plan import Action, Preempt
from sage_sched.scheduler import Scheduler as Core

# The maximum size of the file, and of the previous one.
_MAX_BYTES = 128 * 2**20


def trace_of(scheduler: Scheduler) -> Trace | None:
    """Return this scheduler's trace; None if none is wanted, or another rank writes it. With data
    parallelism each scheduler has a file of its own, FILE.dpN."""
    path: str | None = getattr(scheduler.server_args, "_sage_trace", None)
    if path is None:
        return None
    parallel = get_parallel()
    if parallel.attn_tp_rank != 0 or parallel.attn_cp_rank != 0:
        return None
    name = path if parallel.dp_rank is None else f"{path}.dp{parallel.dp_rank}"
    return Trace(scheduler, JsonLines(Path(name), _MAX_BYTES))


class Trace(Listener):
    """The trace of one scheduler."""

    def __init__(self, scheduler: Scheduler, file: JsonLines) -> None:
        self._scheduler = scheduler
        self._file = file
        self._started_s = time.monotonic()
        self._add("policy", None, name=scheduler.schedule_policy, at=time.time())

    def switched(self, name: str, unfinished: Sequence[Req]) -> None:
        self._add("policy", None, name=name, at=time.time())

    def arrived(self, req: Req) -> None:
        job = req.sage.job
        self._add(
            "came",
            req,
            arrival=job.arrival,
            input_tokens=job.input_tokens,
            max_new_tokens=job.max_new_tokens,
            **predicted(job),
            slo_class=job.hints.slo_class,
            num_waiting=len(view.waiting(self._scheduler)),
            num_running=len(self._scheduler.running_batch.reqs),
            **self._batch(job),
        )

    def _batch(self, job: Job) -> dict[str, Any]:
        """Return the progress of a job's batch."""
        core: Core = self._scheduler.sage.core
        batches = core.limits.batches
        if (batch := batches.of(job)) is None:
            return {}
        report = batches.report(batch, self._scheduler.sage.server, core.now_s)
        return {"batch": report._asdict()}

    def carried_out(
        self, actions: Sequence[Action], reqs: Iterable[Req], left: Sequence[Req]
    ) -> None:
        """Report these actions of a plan. reqs: the requests that they are about. left: the
        requests that were to enter but found no room."""
        requests: dict[Job, Req] = {req.sage.job: req for req in reqs}
        for action in actions:
            if (req := requests.get(action.job)) is None:
                continue
            about: dict[str, Any] = {"reason": action.reason}
            if isinstance(action, Preempt):
                about["way"] = action.mode.value
                if action.to is not None:
                    to = requests.get(action.to)
                    about["to"] = None if to is None else to.rid
            elif req in left:
                about["reason"] = "there was no room after all"
            name = "stays" if req in left else type(action).__name__.lower()
            if action.job.goes_first:
                about["goes_first"] = True
            self._add(name, req, **about)

    def ran(self, batch: Batch) -> None:
        """Report the waits that this batch ends."""
        for req in batch.reqs:
            waits = req.sage.waits
            if waits.since_s is not None:
                self._add(
                    "starts",
                    req,
                    waited_s=round(waits.so_far_s(), 4),
                    place=waits.num_before,
                    tokens=len(req.output_ids),
                )

    def ended(self, req: Req, was_aborted: bool) -> None:
        why = req.sage.refusal or ("aborted" if was_aborted else "done")
        self._add("ends", req, tokens=len(req.output_ids), why=why, **self._batch(req.sage.job))

    def _add(self, what: str, req: Req | None, **about: Any) -> None:
        at_s = round(time.monotonic() - self._started_s, 4)
        whose = {} if req is None else {"rid": req.rid}
        self._file.add({"t": at_s, "is": what, **whose, **about})

    def stats(self) -> dict[str, Any]:
        return {"trace": self._file.stats()}
