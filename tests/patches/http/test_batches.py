"""The batch of a request, and the list of batches."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from patches import carrier
from patches.http import batches, settings_route, state
from patches.http.batches import batch_of
from patches.http.refused import RefusedResponses
from tests.patches.http.conftest import HTTP_SERVER, Manager, generate

HEADERS = {"x-sage-batch": "7", "x-sage-batch-size": "20"}


def said(**other: object) -> dict[str, Any]:
    return {"batch": "b", "batch_size": 20, "done_by": time.time() + 60, **other}


def test_a_batch_counts_where_it_is_trusted() -> None:
    headers = {**HEADERS, "x-sage-done-by": f"{time.time() + 60}"}
    for trust, name in (("none", None), ("header", "7"), ("body", "b")):
        found = batch_of(trust, headers, said(), 1)
        assert (found and found.name) == name
        assert found is None or (found.num_requests == 20 and 59 < found.done_in_s < 60.1)
    several = batch_of("body", {}, {"batch": "b", "done_by": time.time() + 9}, 3)
    assert several is not None
    assert several.num_requests == 3
    assert batch_of("body", headers, {"other": 1}, 1) is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("batch", [None, "", 5, "x" * 257]),
        ("batch_size", [0, 1.5, "many", True, float("nan"), 1e9, 2]),
        ("done_by", [None, "soon", True, float("inf"), float("nan"), 0, time.time() - 1, 1e300]),
    ],
)
def test_bad_fields_are_refused_by_name(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(value)[:30])}.*allowed"):
            batch_of("body", {}, said(**{name: value}), 3)
        if isinstance(value, str | int | float) and name != "batch":
            theirs = {of: key for key, of in batches.HEADERS.items()}
            later = {**HEADERS, "x-sage-done-by": f"{time.time() + 60}", theirs[name]: f"{value}"}
            with pytest.raises(ValueError, match=f"^{name} is"):
                batch_of("header", later, {}, 3)


def test_a_batch_goes_on_to_the_scheduler(make_manager: Callable[..., Manager]) -> None:
    manager = make_manager(slo={"trust": "body"})
    for dry in ({}, {"x-sage-dry-run": "1"}):
        obj = generate("a", {"custom_params": said(__sage_batch=["x", 1, 1.0])})
        tokenized, *_ = manager.receive(obj, headers=dry)
        part = carrier.decode_batch(tokenized.sampling_params.custom_params)
        assert (part and part.name) == (None if dry else "b")
    for malformed in (["b", 1], "b", ["b", "c", 1.0]):
        with pytest.raises(ValueError, match="malformed"):
            carrier.decode_batch({"__sage_batch": malformed})


@pytest.mark.parametrize(
    ("trust", "header", "waits"),
    [
        ("header", "X-Sage-Batch", True),
        ("header", "X-Other", False),
        ("body", "X-Other", True),  # each body may name a batch
        ("none", "X-Sage-Batch", False),
    ],
)
def test_a_stream_of_a_batch_waits_for_its_answer(
    trust: str,
    header: str,
    waits: bool,
    make_manager: Callable[..., Manager],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier status of 200 would be wrong if the batch cannot be done in time."""
    told: list[int] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        told.append(scope["sage.told"].setdefault("sent", len(sent)))
        await send({"type": "http.response.body", "body": b"data: 1"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app = Starlette()
    monkeypatch.setitem(sys.modules, HTTP_SERVER, SimpleNamespace(app=app))
    monkeypatch.setattr(state, "add_settings_route", lambda *given: None)
    make_manager(slo={"trust": trust})
    (middleware,) = (made for made in app.user_middleware if made.cls is RefusedResponses)
    outer = middleware.cls(stream, *middleware.args)
    scope = {"type": "http", "headers": [(header.lower().encode(), b"b")]}
    asyncio.run(outer(scope, None, send))  # type: ignore[arg-type]
    assert (told, len(sent)) == ([0 if waits else 1], 2)


def test_batches_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(api_key="k", admin_api_key=None)
    monkeypatch.setattr(settings_route, "get_serving", lambda: serving)
    app = Starlette()
    found = [{"batch": "b", "num_ended": 3, "done_in_s": 60.0, "predicted_in_s": 50.0}]

    async def states() -> list[dict[str, Any]]:
        return [{"sage": {"batches": found}}, {"sage": {}}]

    batches.add_batches_route(app, SimpleNamespace(get_internal_state=states))
    browser = TestClient(app)
    assert browser.get("/sage/batches").status_code == 401
    (shown,) = browser.get("/sage/batches", headers={"Authorization": "Bearer k"}).json()["batches"]
    assert {name: shown[name] for name in ("batch", "num_ended")} == {"batch": "b", "num_ended": 3}
    assert shown["done_by"] == pytest.approx(time.time() + 60, abs=5)
    assert shown["predicted_done_by"] == pytest.approx(time.time() + 50, abs=5)
