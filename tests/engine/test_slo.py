"""Classes and deadlines on a real server: claims, order and counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import requests

from tests.checks.exactness import ask, differences
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, post

SAMPLING = {"temperature": 0, "max_new_tokens": 4}
ASKED = {"text": SHORT_PROMPT, "sampling_params": SAMPLING}


@pytest.fixture
def server(classes: SageServer) -> SageServer:
    settings(classes, {"schedule_policy": "proserve"})
    return classes


def of_class(name: str) -> dict[str, str]:
    return {"X-SMG-Priority": name}


def started_of(server: SageServer, headers: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The ids of requests with these headers in the order of their starts; all come before."""
    asked = [
        partial(post, server, "/generate", ASKED | {"rid": rid}, given)
        for rid, given in headers.items()
    ]
    stage.together(server, asked)
    assert server.stats()["num_policy_errors"] == 0
    return stage.started(server)


def test_every_route_has_classes_and_ignores_untrusted_claims(server: SageServer) -> None:
    before = server.stats()["slo"]["num_by_class"]
    chat = {"model": "model", "max_tokens": 2}
    said = [{"role": "user", "content": SHORT_PROMPT}]
    batch = {"text": [SHORT_PROMPT] * 2, "sampling_params": SAMPLING | {"n": 2}}
    # Neither the body's priority nor a forged class counts here.
    forged = {"__sage_hint_slo_class": "interactive", "__sage_came_s": 0.0, "slo_class": "bulk"}
    claiming = ASKED | {"priority": 10, "sampling_params": SAMPLING | {"custom_params": forged}}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("bulk", "/generate", ASKED),
        ("bulk", "/generate", batch),
        ("interactive", "/v1/chat/completions", chat | {"messages": said}),
        ("interactive", "/v1/completions", chat | {"prompt": SHORT_PROMPT}),
        ("interactive", "/v1/messages", chat | {"messages": said}),
        ("nobility", "/generate", ASKED),
        ("", "/generate", claiming),
    ]
    for name, path, body in bodies:
        post(server, path, body, of_class(name) if name else None)
    after = server.stats()
    counted = after["slo"]["num_by_class"]
    news = {name: counted[name] - before.get(name, 0) for name in counted}
    assert news == {"bulk": 3, "interactive": 3, "default": 2}
    assert after["num_malformed"] == 0


def test_claims_beyond_a_classs_share_get_the_default(server: SageServer) -> None:
    before = server.stats()["slo"]
    for _ in range(4):
        post(server, "/generate", ASKED, of_class("rare"))
    after = server.stats()["slo"]
    assert after["num_demoted"] - before["num_demoted"] >= 3
    assert after["num_by_class"]["rare"] <= 1


def test_a_deadline_below_the_floor_is_clamped_counted_and_served(server: SageServer) -> None:
    before = server.stats()["slo"]["num_clamped"]
    sampling = {"custom_params": {"ttft_slo_ms": 0.001}}
    answer = generate(server, SHORT_PROMPT, 4, sampling_params=sampling)
    assert answer["meta_info"]["completion_tokens"] == 4
    assert server.stats()["slo"]["num_clamped"] == before + 1


def test_tenants_of_a_fair_class_take_turns(server: SageServer) -> None:
    rids = ("a 1", "a 2", "a 3", "b 1", "b 2")
    headers = {rid: of_class("bulk") | {"X-Sage-Tenant": rid[0]} for rid in rids}
    assert started_of(server, headers) == ["a 1", "b 1", "a 2", "b 2", "a 3"]


def test_attainment_by_class_is_in_server_info_and_metrics(server: SageServer) -> None:
    generate(server, SHORT_PROMPT, 4)
    post(server, "/generate", ASKED, of_class("interactive"))
    slo = server.stats()["slo"]
    assert slo["tdg_ratio"] == 1.0  # an hour for the first token, a minute for each further one
    assert slo["tdg_ratio_by_class"]["interactive"] == 1.0
    assert set(slo["slo_attainment_by_class"]) >= {"default", "interactive"}
    assert "bulk" not in slo["slo_attainment_by_class"]  # nothing was promised to it
    assert slo["slo_attainment_by_metric"] == {"ttft": 1.0, "tpot": 1.0}
    text = requests.get(server.url + "/metrics", timeout=60).text
    series = r'^sage:(\w+)\{[^}]*slo_class="interactive"[^}]*\} (\S+)$'
    found = dict(re.findall(series, text, re.M))
    assert set(found) == {"slo_requests", "slo_good_requests", "slo_attainment", "tdg_ratio"}
    assert all(float(value) >= 1 for value in found.values())


def test_more_weight_goes_first_and_best_effort_last(server: SageServer) -> None:
    # All that were promised something are late, so urgent on any host.
    names = {"bulk": "bulk", "late 1": "late", "high": "late-and-dear", "late 2": "late"}
    headers = {rid: of_class(name) for rid, name in names.items()}
    assert started_of(server, headers) == ["high", "late 1", "late 2", "bulk"]


def test_answers_stay_the_same_under_tight_deadlines(server: SageServer) -> None:
    """Budgets cut prompts, urgent requests go first, others yield."""
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


def test_headers_of_gateways_and_agents_count(server: SageServer) -> None:
    """Class, tenant and deadline by llm-d; priority by Dynamo."""
    before = server.stats()["slo"]
    bulk = {"x-llm-d-inference-objective": "bulk"}
    headers = {
        f"{tenant} {i}": bulk | {"x-llm-d-inference-fairness-id": tenant}
        for i, tenant in enumerate("aab")
    }
    headers["urgent"] = bulk | {"x-dynamo-request-priority": "2"}
    assert started_of(server, headers) == ["urgent", "a 0", "b 2", "a 1"]
    hurried = {"x-llm-d-inference-objective": "default", "x-llm-d-slo-ttft-ms": "0.1"}
    post(server, "/generate", ASKED, hurried)
    after = server.stats()["slo"]
    assert after["num_by_class"]["bulk"] - before["num_by_class"].get("bulk", 0) == 4
    assert after["num_clamped"] == before["num_clamped"] + 1
    with pytest.raises(requests.HTTPError, match="400"):
        post(server, "/generate", ASKED, {"x-llm-d-slo-ttft-ms": "soon"})
