"""A policy from a package of its own, on a real server: the one of docs/policies.md."""

from __future__ import annotations

import re
from functools import partial

import pytest
import requests

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate


@pytest.fixture
def server(one_slot: SageServer) -> SageServer:
    settings(one_slot, {"schedule_policy": "deadlines"})
    return one_slot


def test_its_order_and_its_clients_hints_count(server: SageServer) -> None:
    # All requests have come before the first may start.
    slos_ms = {"none": None, "late": 50_000.0, "soon": 20_000.0, "sooner": 10_000.0}
    asked = [
        partial(
            generate,
            server,
            SHORT_PROMPT,
            4,
            rid=name,
            sampling_params={} if slo_ms is None else {"custom_params": {"ttft_slo_ms": slo_ms}},
        )
        for name, slo_ms in slos_ms.items()
    ]
    stage.together(server, asked)
    assert stage.started(server) == ["sooner", "soon", "late", "none"]
    assert server.stats()["num_policy_errors"] == 0


@pytest.mark.parametrize("slo_ms", [-1.0, 0.0, "soon", None, [1], 1e15])
def test_a_malformed_hint_is_the_clients_error(server: SageServer, slo_ms: object) -> None:
    sampling = {"max_new_tokens": 2, "custom_params": {"ttft_slo_ms": slo_ms}}
    answer = requests.post(
        f"{server.url}/generate", json={"text": "Hello", "sampling_params": sampling}, timeout=300
    )
    if slo_ms is None:  # as if it had not been said
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert re.search("ttft_slo_ms|hint", answer.text)
