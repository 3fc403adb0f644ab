"""/sage/settings of the HTTP server: what it goes by, and to change it while it runs."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.runtime_context import get_parallel, get_serving
from sglang.srt.utils.auth import AuthLevel, auth_level, decide_request_auth
from sglang.utils import TypeBasedDispatcher

from patches.http_types import TokenizerManager
from patches.switch import SetSettings, SettingsNow

PATH = "/sage/settings"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_MAX_BYTES = 65_536


def add_settings_route(manager: TokenizerManager) -> None:
    """GET says what the schedulers go by; POST takes a JSON object of what is to change, and says
    why not (400) or what they go by then. Whoever may call /set_internal_state may call it. Nothing
    is added within a program that has no HTTP server."""
    if _HTTP_SERVER not in sys.modules:
        return
    schedulers: FanOutCommunicator[Any] = FanOutCommunicator(
        manager._dispatch_to_scheduler, get_parallel().num_dp_ranks
    )
    manager.sage_settings_communicator = schedulers  # as SGLang keeps its own
    manager._result_dispatcher += TypeBasedDispatcher([(SettingsNow, schedulers.handle_recv)])

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def settings(request: Request) -> JSONResponse:
        if (refused := _refused(request)) is not None:
            return refused
        changes = None
        if request.method == "POST":
            body = await request.body()
            try:
                if len(body) > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes")
                changes = json.loads(body)
                if not isinstance(changes, dict):
                    raise ValueError("no object")
            except (ValueError, RecursionError) as error:
                return _error(f"the body is no JSON object of settings: {error}", 400)
        manager.auto_create_handle_loop()
        message = SetSettings(changes=json.dumps(changes), now_s=time.monotonic())
        answers: list[SettingsNow] = await schedulers(message)
        for answer in answers:
            if answer.refusal:
                return _error(answer.refusal, 400)
        return JSONResponse(json.loads(answers[0].settings))

    sys.modules[_HTTP_SERVER].app.add_route(PATH, settings, methods=["GET", "POST"])


def _refused(request: Request) -> JSONResponse | None:
    """SGLang itself asks for keys with one HTTP process alone; we with any number of them."""
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
