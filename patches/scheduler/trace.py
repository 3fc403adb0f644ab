"""--sage-trace FILE: what happened to each request and why, as JSON lines.

A thread of its own writes, so that no scheduler waits for a disk. Lines that it cannot take are
dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sglang.srt.runtime_context import get_parallel

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.request import predicted
from sage_sched.job import Job
from sage_sched.plan import Action, Yield

logger = logging.getLogger(__name__)

# The largest size of the file, and of the previous one, FILE.1.
MAX_BYTES = 128 * 2**20
# The most lines that wait for the disk.
_MOST_WAITING = 100_000
_WRITES_EVERY_S = 0.2


def trace_of(scheduler: Scheduler) -> Trace | None:
    """None if no trace is asked for, or another rank writes it. With data parallelism each
    scheduler has a file of its own, FILE.dpN."""
    path: str | None = getattr(scheduler.server_args, "_sage_trace", None)
    if path is None:
        return None
    parallel = get_parallel()
    if parallel.attn_tp_rank != 0 or parallel.attn_cp_rank != 0:
        return None
    return Trace(Path(path if parallel.dp_rank is None else f"{path}.dp{parallel.dp_rank}"))


class Trace:
    """The trace of one scheduler. Nothing here raises: serving matters more than the trace."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: deque[str] = deque()
        self._num_lost = 0
        self._num_written = 0
        self._is_stopped = False
        self._wakes = threading.Event()
        self._started_s = time.monotonic()
        threading.Thread(target=self._write_forever, daemon=True).start()

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
        if self._is_stopped or len(self._lines) >= _MOST_WAITING:
            self._num_lost += 1
            return
        at_s = round(time.monotonic() - self._started_s, 4)
        self._lines.append(json.dumps({"t": at_s, "is": what, **about}, separators=(",", ":")))

    def _write_forever(self) -> None:
        try:
            file = self._opened()
            while True:
                self._wakes.wait(_WRITES_EVERY_S)
                file = self._write(file)
        except OSError as error:
            self._is_stopped = True
            self._num_lost += len(self._lines)
            self._lines.clear()
            logger.error("decisions are no longer written to %s: %s", self._path, error)

    def _write(self, file: IO[bytes]) -> IO[bytes]:
        """Write the waiting lines. Returns the file to go on with: a full one is replaced."""
        while self._lines:
            content = (self._lines[0] + "\n").encode()
            if file.tell() + len(content) > self._max_bytes:
                file.close()
                self._path.replace(f"{self._path}.1")
                file = self._opened()
            file.write(content)
            self._lines.popleft()
            self._num_written += 1
        file.flush()
        return file

    def _opened(self) -> IO[bytes]:
        file = open(self._path, "ab", opener=_own)  # noqa: SIM115
        os.fchmod(file.fileno(), 0o600)  # an existing file too
        return file

    def stats(self) -> dict[str, Any]:
        """Counters for /server_info."""
        return {
            "num_written": self._num_written,
            "num_lost": self._num_lost,
            "is_stopped": self._is_stopped,
        }


def _own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
