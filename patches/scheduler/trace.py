"""--sage-trace FILE: what happened to each request and why, as JSON lines."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from patches.engine_types import Batch, Req, Scheduler
from patches.json_lines import JsonLines
from patches.scheduler.request import predicted
from sage_sched.job import Job
from sage_sched.plan import Action, Yield

# Of the file, and of the previous one.
_MAX_BYTES = 128 * 2**20


def trace_of(scheduler: Scheduler) -> Trace | None:
    """None if no trace is asked for, or another rank writes it. With data parallelism each
    scheduler has a file of its own, FILE.dpN."""
    path: str | None = getattr(scheduler.server_args, "_sage_trace", None)
    if path is None:
        return None
    parallel = get_parallel()
    if parallel.attn_tp_rank != 0 or parallel.attn_cp_rank != 0:
        return None
    name = path if parallel.dp_rank is None else f"{path}.dp{parallel.dp_rank}"
    return Trace(JsonLines(Path(name), _MAX_BYTES))


class Trace:
    """The trace of one scheduler."""

    def __init__(self, file: JsonLines) -> None:
        self.file = file
        self._started_s = time.monotonic()

    def policy(self, name: str) -> None:
        """The policy from now on."""
        self._add("policy", name=name, at=time.time())

    def came(self, req: Req, num_waiting: int, num_running: int) -> None:
        """A request has come."""
        job = req.sage.job
        self._add(
            "came",
            rid=req.rid,
            arrival=job.arrival,
            input_tokens=job.input_tokens,
            max_new_tokens=job.max_new_tokens,
            **predicted(job),
            slo_class=job.hints.slo_class,
            num_waiting=num_waiting,
            num_running=num_running,
        )

    def carried_out(
        self, actions: Sequence[Action], rids: Mapping[Job, str], left: Sequence[str]
    ) -> None:
        """These actions of a plan were. left: the requests that found no room after all."""
        for action in actions:
            if (rid := rids.get(action.job)) is None:
                continue
            about: dict[str, Any] = {"rid": rid, "reason": action.reason}
            if isinstance(action, Yield):
                about["way"] = action.way.value
                if action.to is not None:
                    about["to"] = rids.get(action.to)
            elif rid in left:
                about["reason"] = "there was no room after all"
            name = "stays" if rid in left else type(action).__name__.lower()
            if action.job.is_promised:
                about["promised"] = True
            self._add(name, **about)

    def runs(self, batch: Batch) -> None:
        """A batch is about to run, which ends the waits of its requests."""
        for req in batch.reqs:
            waits = req.sage.waits
            if waits.since_s is not None:
                self._add(
                    "starts",
                    rid=req.rid,
                    waited_s=round(waits.so_far_s(), 4),
                    place=waits.num_before,
                    tokens=len(req.output_ids),
                )

    def ended(self, req: Req, was_aborted: bool) -> None:
        """Its answer is over."""
        why = "aborted" if was_aborted else "done"
        self._add("ends", rid=req.rid, tokens=len(req.output_ids), why=why)

    def _add(self, what: str, **about: Any) -> None:
        at_s = round(time.monotonic() - self._started_s, 4)
        self.file.add({"t": at_s, "is": what, **about})
