"""Aborts that come to the schedulers before their requests.

A request waits in its HTTP process for its prediction. An abort that comes meanwhile, to that
process or to another (--tokenizer-worker-num), would match nothing in the schedulers, and be lost:
SGLang sends one abort a request. So they keep those that may have come too early, for a while.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import AbortReq

from patches.carrier import decode_asked
from patches.engine_types import Scheduler
from patches.http_types import TokenizedRequest
from patches.messages import EarlyAbort

# The latest are kept: so many, and for so long after they were sent.
_MOST, _KEPT_S = 4096, 600.0


class EarlyAborts:
    """One scheduler's. All ranks hear of the same aborts and requests in the same order."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}

    def add(self, abort: EarlyAbort) -> None:
        """It may be of a request that is still to come."""
        self._sent_s.pop(abort.begins, None)
        self._sent_s[abort.begins] = abort.sent_s
        oldest = next(iter(self._sent_s))
        while len(self._sent_s) > _MOST or self._sent_s[oldest] < abort.sent_s - _KEPT_S:
            del self._sent_s[oldest]
            oldest = next(iter(self._sent_s))

    def after(self, scheduler: Scheduler, request: TokenizedRequest) -> None:
        """A request has come: if it was given up before, it goes at once."""
        if self._sent_s and self._has(request.sampling_params.custom_params):
            scheduler.abort_request(AbortReq(rid=request.rid))

    def _has(self, custom_params: object) -> bool:
        """Whether it was given up after it came: its id may have been used before. Who gives up
        all does not mean those that a pause holds back, which were not begun with."""
        if (asked := decode_asked(custom_params)) is None:
            return False
        rid, came_s, begun_s = asked
        return any(
            rid.startswith(begins) and (came_s if begins else begun_s) <= sent_s
            for begins, sent_s in self._sent_s.items()
        )
