"""Keeps aborts that reach the schedulers before their requests.

A request waits in its HTTP process for its prediction. Meanwhile an abort, from that process or
another one (--tokenizer-worker-num), matches nothing in the schedulers. SGLang sends it only once,
so the schedulers keep aborts that may have come too early for a while.
"""

from __future__ import annotations

from collections import Counter

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

from patches.carrier import decode_asked
from patches.engine_types import Scheduler
from patches.messages import EarlyAbort

# The maximum number of aborts, and how long one is kept after it was sent. Each id has at most 152
# characters (patches.carrier.short_id).
_MOST, _KEPT_S = 4096, 600.0


class EarlyAborts:
    """Keeps the early aborts of one scheduler. All ranks get the same aborts and requests in the
    same order, and use the times in them."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}
        # The number of aborts by the length of their ids. SGLang aborts all requests whose ids
        # begin with a given id.
        self._num_of_length: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._sent_s)

    def add(self, abort: EarlyAbort) -> None:
        """Keep an abort, whose request may still come."""
        if abort.begins in self._sent_s:
            self._forget(abort.begins)
        self._sent_s[abort.begins] = abort.sent_s
        self._num_of_length[len(abort.begins)] += 1
        self._expire(abort.sent_s)

    def after(self, scheduler: Scheduler, request: TokenizedGenerateReqInput) -> None:
        """Abort a request that has just reached the scheduler, if an abort of its id was sent after
        the request arrived at its HTTP process. An earlier abort was for another request with the
        same id.

        An abort of all requests spares requests that a pause held back, because their processing
        had not begun.
        """
        asked = decode_asked(request.sampling_params.custom_params)
        if asked is None:
            return
        rid, came_s, begun_s = asked
        self._expire(begun_s)
        beginnings = (rid[:length] for length in self._num_of_length)
        if any(
            (came_s if begins else begun_s) <= self._sent_s[begins]
            for begins in beginnings
            if begins in self._sent_s
        ):
            scheduler.abort_request(AbortReq(rid=request.rid))

    def _expire(self, now_s: float) -> None:
        while self._sent_s:
            oldest = next(iter(self._sent_s))
            if len(self) <= _MOST and self._sent_s[oldest] >= now_s - _KEPT_S:
                return
            self._forget(oldest)

    def _forget(self, begins: str) -> None:
        del self._sent_s[begins]
        self._num_of_length[len(begins)] -= 1
        if not self._num_of_length[len(begins)]:
            del self._num_of_length[len(begins)]
