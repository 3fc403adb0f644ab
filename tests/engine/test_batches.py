"""Batches with a finish time on a real server."""

from __future__ import annotations

import time

import pytest
import requests

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer

BODY = {"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}


def post(
    server: SageServer, left_s: float | None, stream: bool = False, **headers: str
) -> requests.Response:
    """Send a request. With a time it belongs to a batch."""
    if left_s is not None:
        done_by = f"{time.time() + left_s}"
        batch = {"X-Sage-Batch": "b", "X-Sage-Batch-Size": "2", "X-Sage-Done-By": done_by}
        headers = {**batch, **headers}
    return requests.post(
        f"{server.url}/generate", json={**BODY, "stream": stream}, headers=headers, timeout=300
    )


def shown(server: SageServer, name: str) -> dict[str, float]:
    found = requests.get(f"{server.url}/sage/batches", timeout=60).json()["batches"]
    (batch,) = (batch for batch in found if batch["batch"] == name)
    return batch  # type: ignore[no-any-return]


@pytest.fixture
def server(one_slot: SageServer) -> SageServer:
    settings(one_slot, {"schedule_policy": "sage"})
    return one_slot


def test_a_batch_runs_behind_others_until_its_time_is_short(server: SageServer) -> None:
    # Two answers of 8 tokens, 1 s each.
    for name, left_s, is_last in (("later", 3600.0, True), ("soon", 18.0, False)):
        ended: list[str] = []

        def ask(who: str, left_s: float | None = None, name: str = name) -> None:
            assert post(server, left_s, **({"X-Sage-Batch": name} if left_s else {})).ok
            ended.append(who)  # noqa: B023

        batch = [lambda: ask("batch", left_s)] * 2  # noqa: B023
        stage.together(server, [*batch, *[lambda: ask("online")] * 3])
        assert (ended[-2:] == ["batch"] * 2) == is_last
        batch_now = shown(server, name)
        assert (batch_now["num_ended"], batch_now["num_requests"]) == (2, 2)
        assert batch_now["in_time"]


def test_an_impossible_batch_is_refused_at_once(server: SageServer) -> None:
    named = {"X-Sage-Batch": "hopeless"}
    for stream in (False, True):
        answer = post(server, 5.0, stream, **named)
        assert (answer.status_code, "cannot be done in time" in answer.text) == (400, True)
    for headers, field in (
        ({"X-Sage-Done-By": "tomorrow"}, "done_by"),
        ({"X-Sage-Done-By": "1000"}, "done_by"),
        ({"X-Sage-Batch-Size": "0"}, "batch_size"),
        ({"X-Sage-Batch": ""}, "batch"),
    ):
        answer = post(server, 60.0, **{**named, **headers})
        assert (answer.status_code, f"{field} is" in answer.text) == (400, True)
    found = requests.get(f"{server.url}/sage/batches", timeout=60).json()["batches"]
    assert "hopeless" not in [batch["batch"] for batch in found]
    assert post(server, None).ok
