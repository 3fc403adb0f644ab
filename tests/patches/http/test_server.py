"""An HTTP process under our hooks: its app, its counters and its helpers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from patches.http import hooks, settings_route
from patches.http.hooks import router_hooks
from patches.messages import SettingsNow
from sage_sched.app.config import SageConfig
from tests.patches.http.conftest import HTTP_SERVER, Client, Manager, generate, http_hook


def test_a_process_counts_for_its_model(
    make_manager: Callable[..., Manager], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"model_name": "of test_server"}
    monkeypatch.setattr(Manager, "enable_metrics", True)
    collector = SimpleNamespace(labels=labels)
    monkeypatch.setattr(Manager, "metrics_collector", collector, raising=False)
    for name, model in ((None, "its/path"), ("its name", "its name")):
        manager = make_manager({"served_model_name": name}, slo={"trust": "header"})
        assert client.model == model
    manager.receive(generate("My father has crushing chest pain and cannot breathe!"))
    assert REGISTRY.get_sample_value("sage:predictor_records", labels) == 8

    async def theirs(manager: Manager) -> list[dict[str, Any]]:
        return [{"sage": {"policy": "sage", "slo": {"classes": {}}}} for _ in range(2)]

    found = asyncio.run(http_hook("get_internal_state")(theirs, manager))
    slo = {"classes": {}, **manager.sage.claims.stats()}
    ours = {"policy": "sage", "slo": slo, "predictor": client.stats()}
    assert found == [{"sage": ours}] * 2


def test_another_engine_of_this_process_stays_as_it_is() -> None:
    manager, obj = SimpleNamespace(), generate()
    http_hook("__init__")(None, manager, SimpleNamespace())
    for method, *given in (
        ("generate_request", obj), ("_init_req_state", obj), ("_validate_and_resolve_lora", obj),
        ("abort_request", "a"), ("_handle_abort_req", None), ("_handle_batch_output", None),
    ):  # fmt: skip
        http_hook(method)(manager, *given)
    assert (vars(manager), hasattr(obj, "sage")) == ({}, False)


async def refused(request: Any) -> PlainTextResponse:
    request.scope["sage.told"]["refusal"] = {"code": 429, "retry_after_s": 3}
    return PlainTextResponse("what SGLang says")


def test_its_app_shows_settings_and_refusals(
    make_manager: Callable[..., Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Starlette(routes=[Route("/generate", refused)])
    app.middleware_stack = app.build_middleware_stack()  # it serves its warm-up
    make_manager()  # of a program without an HTTP server
    monkeypatch.setitem(sys.modules, HTTP_SERVER, SimpleNamespace(app=app))  # type: ignore[arg-type]
    monkeypatch.setattr(settings_route, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=2))
    serving = SimpleNamespace(api_key=None, admin_api_key=None)
    monkeypatch.setattr(settings_route, "get_serving", lambda: serving)
    manager, browser = make_manager(), TestClient(app)
    settings = {"a": 0, "overload": {"enabled": True}}
    found, text = [], json.dumps(settings)
    for refusal, changes in (("", None), ("", {"a": 1}), ("no room", {"a": 2})):
        # It is the second replica that refuses.
        manager.answers = [SettingsNow(settings=text, refusal=each) for each in ("", refusal)]
        method, body = ("GET", {}) if changes is None else ("POST", {"json": changes})
        answer = browser.request(method, "/sage/settings", **body)
        found.append((answer.status_code, answer.json()))
    assert found == [(200, settings), (200, settings), (400, {"error": "no room"})]
    assert manager.sage.may_refuse
    assert [message.changes for message in manager.sent] == ["null", '{"a": 1}', '{"a": 2}']
    manager.answers = [SettingsNow(settings=text, refusal="")] * 2
    for serving.api_key, serving.admin_api_key in (("key", None), ("another", "key")):
        for key, status in (("", 401), ("another", 401), ("key", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert browser.get("/sage/settings", headers=headers).status_code == status
    answer = browser.get("/generate")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")


def test_several_processes_share_a_worker_that_is_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = SageConfig.parse({"predictor": {"service": "/shared.socket"}})
    starts: list[SageConfig] = []

    def worker(config: SageConfig) -> Any:
        return SimpleNamespace(config=shared, start=lambda: starts.append(config))

    monkeypatch.setattr(hooks, "SharedWorker", worker)
    own = SageConfig()
    for config, expected in ((own, shared), (shared, shared)):
        server_args = SimpleNamespace(_sage_config=config)
        router_hooks[0].hook(None, None, server_args)
        assert server_args._sage_config is expected
    router_hooks[0].hook(None, None, SimpleNamespace())  # under a policy of SGLang's
    assert starts == [own]
