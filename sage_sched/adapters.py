"""Requests whose adapters (LoRA) find no room: others do not pass them for ever."""

from __future__ import annotations

from sage_sched.job import Job
from sage_sched.view import SchedulerView

# While the server works through so many batches (the KV that running jobs hold), others pass jobs
# without room for their adapters. With more, such jobs wait for longer; with fewer, the batch runs
# empty more often.
_BATCHES = 4


class Adapters:
    """Decides who passes a job whose adapter finds no room. The engine would let all others pass.

    If adapters that have room never run out of requests, no other ever gets it. So others pass only
    until the server has done so much work meanwhile (_BATCHES). From then on no job behind the
    first one of the order that has no room enters, until that one has room: jobs that run come to
    an end, and give back theirs. Then the count begins anew. So each job that stays first among
    those without room waits for a bounded time, under any policy. Nobody ever passes a promised
    job.
    """

    def __init__(self) -> None:
        # The server's work when the count began, and the job that nobody passes.
        self._since_tokens: int | None = None
        self._next: Job | None = None

    def without_room_last(
        self, order: list[int], num_open: int, view: SchedulerView
    ) -> tuple[list[int], int]:
        """The order with the jobs at its end that have no room for their adapters, or must not pass
        one that has none; and how many may enter. Nobody should yield to the others."""
        waiting = view.waiting
        has_room = view.has_adapter if view.adapters_in_order is None else view.adapters_in_order()
        without = {p for p in order[:num_open] if not has_room(p)}
        if not without or (self._next and self._next not in {waiting[p] for p in without}):
            self._since_tokens = self._next = None
        if not without:
            return order, num_open
        if self._since_tokens is None:
            self._since_tokens = view.served_tokens
        worked_tokens = view.served_tokens - self._since_tokens
        is_due = self._next is not None or worked_tokens > _BATCHES * max(1, view.locked_tokens)
        runs_any = view.running or view.chunked  # a server must not stand still
        may_enter: list[int] = []
        for position in order[:num_open]:
            if position not in without:
                may_enter.append(position)
            elif (is_due or waiting[position].is_promised) and (runs_any or may_enter):
                self._next = waiting[position]
                break
        enters = set(may_enter)
        return [*may_enter, *(p for p in order if p not in enters)], len(may_enter)
