"""The route /sage/settings: shows the settings, and changes them while the server runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level, decide_request_auth
from sglang.utils import TypeBasedDispatcher

from patches.messages import SetSettings, SettingsNow

PATH = "/sage/settings"
_MAX_BYTES = 65_536


def add_settings_route(
    app: Any, manager: TokenizerManager, switched: Callable[[Mapping[str, Any]], None]
) -> None:
    """Add the route to SGLang's app.

    switched: called with the schedulers' settings whenever this process asks for them.

    GET shows the schedulers' settings. POST takes a JSON object of changes, and answers with the
    new settings, or with a refusal and its reason (400). It is open to clients that may call
    /set_internal_state.
    """
    schedulers: FanOutCommunicator[Any] = FanOutCommunicator(
        manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    manager._result_dispatcher += TypeBasedDispatcher([(SettingsNow, schedulers.handle_recv)])

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def settings(request: Request) -> JSONResponse:
        if (answer := refused(request)) is not None:
            return answer
        manager.auto_create_handle_loop()
        try:
            is_post = request.method == "POST"
            changes = changes_of(await body_of(request)) if is_post else None
        except ValueError as error:
            return _error(str(error), 400)
        message = SetSettings(changes=json.dumps(changes))
        answers: list[SettingsNow] = await schedulers(message)
        if refusal := next((answer.refusal for answer in answers if answer.refusal), ""):
            return _error(refusal, 400)
        found = json.loads(answers[0].settings)
        switched(found)
        return JSONResponse(found)

    app.add_route(PATH, settings, methods=["GET", "POST"])


async def body_of(request: Request) -> bytes:
    """Return the body. Raises ValueError once it is longer than settings can be, and reads no
    further."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BYTES:
            raise ValueError(f"the body is more than {_MAX_BYTES} bytes")
    return body


def changes_of(body: bytes) -> dict[str, object]:
    """Return the changes in a body. Raises ValueError with the reason if it is malformed."""
    try:
        changes = json.loads(body)
        if not isinstance(changes, dict):
            raise ValueError("no object")
        json.dumps(changes, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is no JSON object of settings: {error}") from error
    return changes


def refused(request: Request) -> JSONResponse | None:
    """Return the refusal of a request without the right key, or None. SGLang checks keys only if
    there is one HTTP process; we always do."""
    decision = decide_request_auth(
        method=request.method,
        path=request.url.path,
        authorization_header=request.headers.get("Authorization"),
        api_key=get_serving().api_key,
        admin_api_key=get_serving().admin_api_key,
        auth_level=AuthLevel.ADMIN_OPTIONAL,
    )
    return None if decision.allowed else _error("Unauthorized", decision.error_status_code)


def _error(what: str, status_code: int) -> JSONResponse:
    return JSONResponse({"error": what}, status_code)
