"""Ends the answers of retracted requests that would go on differently."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from patches.engine_types import Req
from patches.scheduler.survival import why_not_retractable


def end_lost(retracted: Iterable[Req]) -> tuple[list[Req], list[Req]]:
    """Return the retracted requests whose answers go on when memory is free, and the others, which
    get a reason to end."""
    kept: list[Req] = []
    lost: list[Req] = []
    for req in retracted:
        reason = why_not_retractable(req) if req.sage.job.generated_tokens else None
        (kept if reason is None else lost).append(req)
        if reason is not None:
            message = (
                f"the KV memory is full, and the answer to a request with {reason} cannot be "
                "continued after it has lost its memory. Try again later."
            )
            req.to_finish = FINISH_ABORT(message, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return kept, lost
