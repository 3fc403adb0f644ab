"""Classes and deadlines on a real server: claims, turns and exactness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import requests

from tests.checks.exactness import ask, differences
from tests.engine.crowds import ask_together, started
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, UNASKED_SHORT_PROMPT, SageServer, post

SAMPLING = {"temperature": 0, "max_new_tokens": 4}
ASKED = {"text": SHORT_PROMPT, "sampling_params": SAMPLING}


@pytest.fixture
def server(classes: SageServer) -> SageServer:
    settings(classes, {"schedule_policy": "proserve"})
    return classes


def of_class(name: str) -> dict[str, str]:
    return {"X-SMG-Priority": name}


def test_claims_count_on_every_route_within_their_limits(server: SageServer) -> None:
    before = server.stats()["slo"]
    chat = {"model": "model", "max_tokens": 2}
    said = [{"role": "user", "content": SHORT_PROMPT}]
    batch = {"text": [SHORT_PROMPT] * 2, "sampling_params": SAMPLING | {"n": 2}}
    # Neither the body's priority nor a forged class counts here.
    forged = {"__sage_hint_slo_class": "interactive", "__sage_came_s": 0.0, "slo_class": "bulk"}
    hurried = {"ttft_slo_ms": 0.001}  # below the floor of the default class
    own = [SAMPLING | {"custom_params": params} for params in (forged, hurried)]
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("bulk", "/generate", ASKED),
        ("bulk", "/generate", batch),
        ("interactive", "/v1/chat/completions", chat | {"messages": said}),
        ("interactive", "/v1/completions", chat | {"prompt": SHORT_PROMPT}),
        ("interactive", "/v1/messages", chat | {"messages": said}),
        ("nobility", "/generate", ASKED),
        ("", "/generate", ASKED | {"priority": 10, "sampling_params": own[0]}),
        ("", "/generate", ASKED | {"sampling_params": own[1]}),
    ]
    for name, path, body in bodies:
        post(server, path, body, of_class(name) if name else None)
    # A gateway's headers.
    late = {"x-llm-d-inference-objective": "default", "x-llm-d-slo-ttft-ms": "0.1"}
    post(server, "/generate", ASKED, late)
    with pytest.raises(requests.HTTPError, match="400"):
        post(server, "/generate", ASKED, {"x-llm-d-slo-ttft-ms": "soon"})
    after = server.stats()
    assert after["num_malformed"] == 0
    news = Counter(after["slo"]["num_by_class"]) - Counter(before["num_by_class"])
    assert news == {"bulk": 3, "interactive": 3, "default": 4}
    assert after["slo"]["num_clamped"] == before["num_clamped"] + 2


def test_tenants_of_a_fair_class_take_turns(server: SageServer) -> None:
    rids = ("a 1", "a 2", "a 3", "b 1", "b 2")
    asked = {rid: {"headers": of_class("bulk") | {"X-Sage-Tenant": rid[0]}} for rid in rids}
    bulk = {"x-llm-d-inference-objective": "bulk"}
    asked["b 2"] = {"headers": bulk | {"x-llm-d-inference-fairness-id": "b"}}
    asked["urgent"] = {"headers": bulk | {"x-dynamo-request-priority": "2"}}
    # All get the same prediction, even while the store learns the last test's answers.
    asked = {rid: {"prompt": UNASKED_SHORT_PROMPT, **said} for rid, said in asked.items()}
    assert started(server, asked) == ["urgent", "a 1", "b 1", "a 2", "b 2", "a 3"]


def test_answers_stay_the_same_under_tight_deadlines(server: SageServer) -> None:
    """Budgets cut prompts, urgent requests go first, and others yield."""
    asked = [(f"{SHORT_PROMPT} Case {i}. " + "And so on. " * (i % 4) * 8, 40) for i in range(12)]
    sampling = [
        {"custom_params": {"ttft_slo_ms": 1000.0 + 50 * i, "tpot_slo_ms": 1.0 + 20 * (i % 4)}}
        for i in range(12)
    ]
    together = ask_together(server, asked, sampling)
    assert differences(ask(server, asked, 1), together)[0] == 0
    stats = server.stats()
    assert stats["num_policy_errors"] == 0
    assert stats["slo"]["tdg_ratio"] <= 1.0
