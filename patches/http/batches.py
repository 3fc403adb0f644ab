"""Reads which batch a request is a part of, and shows the batches (the route /sage/batches)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.auth import AuthLevel, auth_level

from patches.http.settings_route import refused
from sage_sched.job import MAX_NAME_CHARACTERS, BatchPart

PATH = "/sage/batches"
# The fields, by the headers that give them.
HEADERS = {"x-sage-batch": "batch", "x-sage-batch-size": "batch_size", "x-sage-done-by": "done_by"}
_MOST_REQUESTS = 1_000_000
_MOST_S = 366 * 86_400


def batch_of(
    trust: str, headers: Mapping[str, str], body: Mapping[str, Any], num_prompts: int
) -> BatchPart | None:
    """Return the batch that a request is a part of, by the headers or the body's custom_params,
    whichever is trusted; None for none. Raises ValueError.

    trust: slo.trust, because a batch's time is promised. num_prompts: how many requests the call
    has, which is the size of a batch if none is given.
    """
    given: dict[str, Any] = {}
    if trust == "header":
        texts = {name: headers[key] for key, name in HEADERS.items() if key in headers}
        given = {name: text if name == "batch" else _number(text) for name, text in texts.items()}
    elif trust == "body" and isinstance(body, Mapping):
        given = {name: body[name] for name in HEADERS.values() if name in body}
    if not given:
        return None
    name, size = given.get("batch"), given.get("batch_size", num_prompts)
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(
            f"batch is {name!r:.40}, allowed: an id of 1 to {MAX_NAME_CHARACTERS} characters"
        )
    if type(size) not in (int, float) or size % 1 or not num_prompts <= size <= _MOST_REQUESTS:
        allowed = (
            f"a whole number from {num_prompts}, the prompts of this call, to {_MOST_REQUESTS}"
        )
        raise ValueError(f"batch_size is {size!r:.40}, allowed: {allowed}")
    done_by, now = given.get("done_by", ""), time.time()
    if type(done_by) not in (int, float) or not now < done_by <= now + _MOST_S:
        allowed = f"a Unix time in seconds, after {now:.0f} and within {_MOST_S // 86_400} days"
        raise ValueError(f"done_by is {done_by!r:.40}, allowed: {allowed}")
    return BatchPart(name, int(size), done_by - now)


def _number(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def add_batches_route(app: Any, manager: TokenizerManager) -> None:
    """Add the route to SGLang's app."""

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def batches(request: Request) -> JSONResponse:
        if (answer := refused(request)) is not None:
            return answer
        states = await manager.get_internal_state()
        now = time.time()
        found = [
            shown(batch, now) for state in states for batch in state["sage"].get("batches", ())
        ]
        return JSONResponse({"batches": found})

    app.add_route(PATH, batches, methods=["GET"])


def shown(batch: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return a scheduler's report of a batch with times from now as Unix times."""
    times = {"done_in_s": "done_by", "predicted_in_s": "predicted_done_by"}
    return {
        times.get(name, name): round(now + value, 1) if name in times else value
        for name, value in batch.items()
    }
