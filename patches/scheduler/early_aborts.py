"""Aborts that come to the schedulers before their requests.

A request waits in its HTTP process for its prediction. An abort that comes meanwhile, to that
process or to another (--tokenizer-worker-num), would match nothing in the schedulers, and be lost:
SGLang sends one abort a request. So they keep those that may have come too early, for a while.
"""

from __future__ import annotations

import time

from sglang.srt.managers.io_struct import AbortReq, BaseReq, hook_custom_types

from patches.carrier import decode_asked
from patches.http.http_types import TokenizedRequest, TokenizerManager
from patches.scheduler.engine_types import Scheduler

# The latest are kept: so many, and for so long after they were sent.
_MOST, _KEPT_S = 4096, 600.0


class EarlyAbort(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """From an HTTP process, to all ranks.

    begins: of the ids of the requests that are given up; "" for all. sent_s: when, on the clock of
    their stamps.
    """

    begins: str
    sent_s: float


# What SGLang's processes may send one another is a closed list.
hook_custom_types(EarlyAbort)


def tell(manager: TokenizerManager, rid: str, abort_all: bool) -> None:
    """An HTTP process is about to abort: if that may be too early, the schedulers are to know."""
    if abort_all or _is_early(manager, rid):
        begins = "" if abort_all else rid
        manager._dispatch_to_scheduler(EarlyAbort(begins=begins, sent_s=time.monotonic()))


def _is_early(manager: TokenizerManager, rid: str) -> bool:
    """Whether it may be: what is not known here may be awaited in another process."""
    state = manager.rid_to_state.get(rid)
    if state is None:
        return rid != "" and manager.server_args.tokenizer_worker_num > 1
    return not state.dispatched


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
