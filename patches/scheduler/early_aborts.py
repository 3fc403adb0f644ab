"""Aborts that reach the schedulers before their requests.

A request waits in its HTTP process for its prediction. Meanwhile an abort, from that process or
another one (--tokenizer-worker-num), matches nothing in the schedulers. SGLang sends it only once,
so the schedulers keep aborts that may have come too early for a while.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput

from patches.carrier import decode_asked
from patches.engine_types import Scheduler
from patches.messages import EarlyAbort

# How many of the latest are kept, and how long after they were sent.
_MOST, _KEPT_S = 4096, 600.0


class EarlyAborts:
    """Those of one scheduler. All ranks get the same aborts and requests in the same order."""

    def __init__(self) -> None:
        self._sent_s: dict[str, float] = {}

    def add(self, abort: EarlyAbort) -> None:
        """An abort has come. Its request may be still to come."""
        self._sent_s.pop(abort.begins, None)
        self._sent_s[abort.begins] = abort.sent_s
        first_s = abort.sent_s - _KEPT_S
        while len(self._sent_s) > _MOST or next(iter(self._sent_s.values())) < first_s:
            del self._sent_s[next(iter(self._sent_s))]

    def after(self, scheduler: Scheduler, request: TokenizedGenerateReqInput) -> None:
        """A request has come: abort it at once if it was aborted after it came, as its id may have
        been used before. An abort of all requests spares those that a pause held back: their
        processing had not begun."""
        asked = decode_asked(request.sampling_params.custom_params)
        if not self._sent_s or asked is None:
            return
        rid, came_s, begun_s = asked
        if any(
            rid.startswith(begins) and (came_s if begins else begun_s) <= sent_s
            for begins, sent_s in self._sent_s.items()
        ):
            scheduler.abort_request(AbortReq(rid=request.rid))
