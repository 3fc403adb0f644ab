"""Hides waiting requests from SGLang: from its limits, and from a decode server's admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.environ import envs

from patches.engine_types import Req, Scheduler
from patches.scheduler.view import swapped


def timed_out(scheduler: Scheduler, poll: Callable[[], list[Any]]) -> list[Any]:
    """Return the aborts for SGLang's timeouts, and note their reasons.

    A preempted request neither waits for its start nor runs, so its time off the device counts as
    neither. Only one rank calls this; its result is broadcast.
    """
    aborts = poll()
    if not aborts:
        return []
    # SGLang's running timeout counts from the start of a request.
    batches = [batch for batch in scheduler._collect_inflight_batches() if batch is not None]
    running = {req.rid: req for batch in batches for req in batch.reqs}
    limit_s = envs.SGLANG_REQ_RUNNING_TIMEOUT.get()
    reqs = {req.rid: req for req in scheduler.waiting_queue} | running
    found = []
    for abort in aborts:
        state = reqs[abort.rid].sage
        if state.is_preempted or (abort.rid in running and state.waits.ran_s() <= limit_s):
            continue
        state.refusal = abort.abort_message
        found.append(abort)
    return found


def without_started(scheduler: Scheduler, call: Callable[[], Any]) -> Any:
    """Call a function that counts queued requests, and hide the requests that do not count.

    Swapped-out requests do not count. Nor does the first request on an idle server: SGLang would
    start it before the next arrives, but ours may wait for its prediction and arrive together with
    the next.
    """
    hidden = swapped(scheduler.waiting_queue)
    if not hidden and scheduler.is_fully_idle(ignore_waiting=True):
        hidden = scheduler.waiting_queue[:1]
    return _without(scheduler, hidden, call)


def _without(scheduler: Scheduler, hidden: Sequence[Req], call: Callable[[], Any]) -> Any:
    """Call a function while these waiting requests are hidden from it."""
    if not hidden:
        return call()
    unseen, queue = {id(req) for req in hidden}, scheduler.waiting_queue
    scheduler.waiting_queue = visible = [req for req in queue if id(req) not in unseen]
    num_visible = len(visible)
    try:
        return call()
    finally:
        if len(visible) < num_visible:  # a full queue drops one for a higher priority
            kept = unseen | {id(req) for req in visible}
            queue = [req for req in queue if id(req) in kept]
        scheduler.waiting_queue = queue


class Room:
    """Decides which waiting requests SGLang's DecodePreallocQueue may admit in a pass.

    refused: the last request that asked to enter, if the KV pool had no room for it.
    """

    def __init__(self) -> None:
        self._open: set[int] | None = None
        self.refused: Req | None = None

    def open_to_all(self) -> None:
        """Let every request enter."""
        self._open = self.refused = None

    def open_to(self, reqs: Sequence[Req]) -> None:
        """Let only these requests enter."""
        self._open, self.refused = {id(req) for req in reqs}, None

    def needed_tokens(self, req: Req, theirs: int, pool_tokens: int) -> int:
        """Return the KV tokens that have to be free for a request. SGLang admits no request behind
        the first that finds too few.

        theirs: SGLang's count.
        """
        if self._open is not None and id(req) not in self._open:
            return 2 * pool_tokens
        self.refused = req
        return theirs
