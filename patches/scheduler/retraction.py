"""Ends the answers of retracted requests that would go on differently."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from patches.engine_types import Req, Scheduler
from patches.scheduler.survival import why_not_retractable
from patches.scheduler.view import is_swapped


def end_lost(retracted: Iterable[Req]) -> tuple[list[Req], list[Req]]:
    """Return the retracted requests whose answers go on when memory is free, and the others, which
    get a reason to end."""
    kept: list[Req] = []
    lost: list[Req] = []
    for req in retracted:
        reason = _why_lost(req, "the KV memory is full")
        (kept if reason is None else lost).append(req)
        if reason is not None:
            req.to_finish = reason
    return kept, lost


def ends_in_pause(scheduler: Scheduler, req: Req) -> bool:
    """Return whether a request that joins the queue ends, because a pause of mode retract took the
    memory of its answer. If so, its client has been told, and the caller must release it."""
    lost = None if is_swapped(req) else _why_lost(req, "the server was paused by retracting")
    if lost is None:
        return False
    scheduler.send_abort_output(AbortReq(rid=req.rid, finished_reason=lost.to_json()), req)
    return True


def _why_lost(req: Req, cause: str) -> FINISH_ABORT | None:
    # A job's age may be old while none waits, and a retraction discards some requests' tokens.
    has_begun = req.sage.job.generated_tokens > 0 or req.send_token_offset > 0
    reason = why_not_retractable(req) if has_begun else None
    if reason is None:
        return None
    message = (
        f"{cause}, and the answer to a request with {reason} cannot be continued after it has lost "
        "its memory. Try again later."
    )
    return FINISH_ABORT(message, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
