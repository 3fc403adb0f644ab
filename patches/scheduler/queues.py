"""Lists a scheduler's requests by state, on one server or on separate prefill and decode servers,
and controls which prompts a decode server admits to its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.kv_copy import swapped


def only_prefills(scheduler: Scheduler) -> bool:
    """Whether this server's requests move to a decode server with their first token."""
    return bool(scheduler.server_args.disaggregation_mode == "prefill")


def only_decodes(scheduler: Scheduler) -> bool:
    """Whether the KV of this server's prompts comes from a prefill server."""
    return bool(scheduler.server_args.disaggregation_mode == "decode")


def waiting(scheduler: Scheduler) -> list[Req]:
    """Return the requests that a plan puts in order.

    On a decode server these are swapped out, or their prompts have no room yet. If preemption is
    off there, SGLang alone resumes the requests that it retracts.
    """
    if not only_decodes(scheduler):
        return scheduler.waiting_queue
    queue = scheduler.disagg_decode_prealloc_queue
    ready = [entry.req for entry in queue.queue if entry.waiting_for_input]
    return ready if scheduler.sage.preemption is None else [*queue.retracted_queue, *ready]


def in_host_memory(scheduler: Scheduler) -> list[Req]:
    """Return the waiting requests whose KV is in host memory, in the order of the queue."""
    return swapped(waiting(scheduler))


def held(scheduler: Scheduler) -> list[Req]:
    """Return the requests that hold KV but do not run yet: the KV of their prompts is on its way,
    or has arrived."""
    if not only_decodes(scheduler):
        return []
    on_the_way = [entry.req for entry in scheduler.disagg_decode_transfer_queue.queue]
    return [*scheduler.waiting_queue, *on_the_way]


def unseen(scheduler: Scheduler) -> list[Req]:
    """Return the requests that no plan sees: the two servers are not connected for them yet, or
    their KV is being sent."""
    if only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue.queue
        return [entry.req for entry in queue if not entry.waiting_for_input]
    if only_prefills(scheduler):
        sent: list[Req] = scheduler.disagg_prefill_inflight_queue
        return [*scheduler.disagg_prefill_bootstrap_queue.queue, *sent]
    return []


def drop_ended(scheduler: Scheduler, running_batch: Batch) -> None:
    """Remove the requests that have ended since the last pass from the running batch. They hold no
    KV to free, and a policy that has just taken over does not know them. SGLang removes them before
    a prefill pass (since 0.5.23), but only after the pass of a decode server."""
    if not scheduler.sage.any_has_ended:
        return
    scheduler.sage.any_has_ended = False
    num_reqs = len(running_batch.reqs)
    running_batch.filter_batch()
    if len(running_batch.reqs) < num_reqs:
        running_batch.batch_is_full = False


def sort_by_arrival(scheduler: Scheduler) -> None:
    """Sort by arrival all queues that our plans reorder."""

    def arrival(req: Req) -> int:
        return int(req.sage.job.arrival)

    scheduler.waiting_queue.sort(key=arrival)
    if only_decodes(scheduler):
        queue = scheduler.disagg_decode_prealloc_queue
        queue.retracted_queue.sort(key=arrival)
        queue.queue.sort(key=lambda entry: arrival(entry.req))


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
