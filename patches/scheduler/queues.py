"""Where a scheduler's requests are, on one server or on those that prefill and decode apart, and
who gets room for the KV of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from patches.engine_types import Req, Scheduler
from patches.scheduler.kv_copy import swapped


def only_prefills(scheduler: Scheduler) -> bool:
    """Whether its requests go to a decode server with their first token."""
    return bool(scheduler.server_args.disaggregation_mode == "prefill")


def only_decodes(scheduler: Scheduler) -> bool:
    """Whether the KV of its prompts comes from a prefill server."""
    return bool(scheduler.server_args.disaggregation_mode == "decode")


def waiting(scheduler: Scheduler) -> list[Req]:
    """Those that a plan puts in order. On a decode server they are in host memory, or their prompt
    has no room yet; unless requests may leave there, SGLang alone brings back whom it retracts."""
    if not only_decodes(scheduler):
        return scheduler.waiting_queue
    queue = scheduler.disagg_decode_prealloc_queue
    ready = [entry.req for entry in queue.queue if entry.waiting_for_input]
    return ready if scheduler.sage.preemption is None else [*queue.retracted_queue, *ready]


def in_host_memory(scheduler: Scheduler) -> list[Req]:
    """Those whose KV was copied there, in the order of the queue."""
    return swapped(waiting(scheduler))


def held(scheduler: Scheduler) -> list[Req]:
    """Those that have room and do not run yet: their prompt's KV is on its way, or has come."""
    if not only_decodes(scheduler):
        return []
    on_the_way = [entry.req for entry in scheduler.disagg_decode_transfer_queue.queue]
    return [*scheduler.waiting_queue, *on_the_way]


def unseen(scheduler: Scheduler) -> list[Req]:
    """Those that no plan sees: the servers do not know of each other yet, or KV is being sent."""
    if only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue.queue
        return [entry.req for entry in queue if not entry.waiting_for_input]
    if only_prefills(scheduler):
        sent: list[Req] = scheduler.disagg_prefill_inflight_queue
        return [*scheduler.disagg_prefill_bootstrap_queue.queue, *sent]
    return []


def sort_by_arrival(scheduler: Scheduler) -> None:
    """All queues that our plans put in another order."""

    def arrival(req: Req) -> int:
        return int(req.sage.job.arrival)

    scheduler.waiting_queue.sort(key=arrival)
    if only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue
        queue.retracted_queue.sort(key=arrival)
        queue.queue.sort(key=lambda entry: arrival(entry.req))


class Room:
    """Who of those that wait may get room in a pass, for SGLang's DecodePreallocQueue. refused: who
    asked last, if there was none."""

    def __init__(self) -> None:
        self._open: set[int] | None = None
        self.refused: Req | None = None

    def open_to_all(self) -> None:
        """Everybody may."""
        self._open = self.refused = None

    def open_to(self, reqs: Sequence[Req]) -> None:
        """These alone may."""
        self._open, self.refused = {id(req) for req in reqs}, None

    def needed_tokens(self, req: Req, theirs: int, pool_tokens: int) -> int:
        """KV that has to be free for a request. theirs: by SGLang's count. SGLang gives no room to
        those behind the first that finds none."""
        if self._open is not None and id(req) not in self._open:
            return 2 * pool_tokens
        self.refused = req
        return theirs
