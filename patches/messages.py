"""Our messages between SGLang's processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, BaseReq, hook_custom_types

from sage_sched.batches import TooLate
from sage_sched.overload import Refusal
from sage_sched.overload.waits import Newcomer


class Tick(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """Rank 0's clock, broadcast to all ranks with the requests.

    clock: the clock's name (patches.carrier).
    """

    now_s: float
    clock: str


class StepTimes(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """Rank 0's step times, broadcast to all ranks with the requests.

    seconds: the coefficients of a StepTime, in order.
    source: see Calibration.
    """

    seconds: list[float]
    source: str


class Scores(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """Rank 0's probe scores, broadcast to all ranks with the requests.

    number: the running number of the last score.
    arrivals, ages: one of each per row.
    steps: int8, rows of bins (sage_sched.probe.refining.in_steps).
    """

    number: int
    arrivals: list[int]
    ages: list[int]
    steps: bytes


class SetSettings(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """A change of settings, from an HTTP process to the schedulers. It travels with the broadcast
    too, so all ranks read it between the same two passes.

    changes: JSON for sage_sched.app.switch.Settings.changed; null to change nothing.
    """

    changes: str


class SettingsNow(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """A scheduler's answer to SetSettings.

    settings: JSON of the settings in force.
    refusal: why nothing was changed; "" if it was.
    """

    settings: str
    refusal: str


class EarlyAbort(BaseReq, kw_only=True):  # type: ignore[call-arg, misc]
    """An abort that may arrive before its request, from an HTTP process to all ranks.

    begins: a prefix of the ids of the aborted requests; "" for all.
    sent_s: when it was sent, on the clock of the arrival stamps.
    """

    begins: str
    sent_s: float


# SGLang's processes accept only registered message types.
hook_custom_types(SetSettings, SettingsNow, EarlyAbort)


# The status of a request that we refuse, of one that ends in the queue (by SGLang's limits or the
# client's budget of waiting), and of one whose batch cannot be done in time.
REFUSED, ENDED, TOO_LATE = 429, 503, 400
_PRIORITY_IS_OFF = "Using priority is disabled"
_REFUSAL = "sage_"


def in_abort(refusal: Refusal) -> dict[str, str | int]:
    """Return a refusal as the reason of an AbortReq. Its numbers have to be whole."""
    predicted_ms, limit_ms = (round(1e3 * s) for s in (refusal.predicted_s, refusal.deadline_s))
    retry_after_s = math.ceil(refusal.retry_after_s)
    return {
        "type": "abort",
        "status_code": REFUSED,
        "message": f"The server is overloaded: {refusal.metric.upper()} would be {predicted_ms} "
        f"ms, and the limit is {limit_ms} ms. Come back in {retry_after_s} s.",
        f"{_REFUSAL}metric": refusal.metric,
        f"{_REFUSAL}predicted_ms": predicted_ms,
        f"{_REFUSAL}limit_ms": limit_ms,
        f"{_REFUSAL}retry_after_s": retry_after_s,
    }


def too_late_in_abort(late: TooLate) -> dict[str, str | int]:
    """Return why a batch is refused as the reason of an AbortReq."""
    return {
        "type": "abort",
        "status_code": TOO_LATE,
        "message": f"batch {late.name!r:.40} cannot be done in time: it takes at least "
        f"{late.least_s:.1f} s, and {late.left_s:.1f} s are left until its done_by",
        f"{_REFUSAL}least_ms": round(1e3 * late.least_s),
        f"{_REFUSAL}left_ms": round(1e3 * late.left_s),
    }


def ends_in_queue(abort: AbortReq) -> bool:
    """Whether a request is turned away because it would wait too long, or has done so."""
    reason = abort.finished_reason or {}
    is_late = reason.get("status_code") in (REFUSED, ENDED)
    return is_late and not reason["message"].startswith(_PRIORITY_IS_OFF)


def add_return(abort: AbortReq, after_s: Callable[[], float]) -> None:
    """Add the seconds after which the client may come back, unless they are there already."""
    reason = abort.finished_reason
    if f"{_REFUSAL}retry_after_s" not in reason:
        reason[f"{_REFUSAL}retry_after_s"] = math.ceil(after_s())


def answer_in_abort(
    newcomer: Newcomer, refusal: Refusal | None, mode: str, *, is_full: bool = False
) -> dict[str, str | int]:
    """Return the answer to a dry run on a server of this disaggregation mode as the reason of an
    AbortReq. It holds the predicted times that such a server knows.

    is_full: whether the request would be turned away because too many prompt tokens wait.
    """
    refused = {} if refusal is None else in_abort(refusal)
    times_s = {"ttft_ms": newcomer.ttft_s, "ttlt_ms": newcomer.ttlt_s}
    known = {"prefill": ["ttft_ms"], "decode": ["ttlt_ms"]}.get(mode, [*times_s])
    return {
        **refused,
        "type": "abort",
        "status_code": REFUSED,
        "message": "a dry run",
        **{f"{_REFUSAL}{name}": round(1e3 * times_s[name]) for name in known},
        f"{_REFUSAL}late": int(is_full or refusal is not None),
    }


def refusal_in(abort: AbortReq) -> dict[str, Any] | None:
    """Return the fields of a refusal, also of a batch, or of the answer to a dry run, for the
    client, and the status as `code`; None if the abort is none of these."""
    reason: dict[str, Any] = abort.finished_reason or {}
    fields = {k.removeprefix(_REFUSAL): v for k, v in reason.items() if k.startswith(_REFUSAL)}
    if not fields:
        return None
    return {"code": reason["status_code"], "message": reason["message"], **fields}
