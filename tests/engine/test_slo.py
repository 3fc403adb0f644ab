"""Classes and deadlines on a real server: claims, order and counters."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import requests

from bench.engines.server.server import Server
from tests.checks.exactness import ask, differences
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate


@pytest.fixture
def server(classes: SageServer) -> SageServer:
    settings(classes, {"schedule_policy": "proserve"})
    return classes


def say(
    server: Server, slo_class: str | None, path: str = "/generate", tenant: str = "", **body: Any
) -> Any:
    headers = {} if slo_class is None else {"X-SMG-Priority": slo_class}
    if tenant:
        headers["X-Sage-Tenant"] = tenant
    answer = requests.post(server.url + path, json=body, headers=headers, timeout=300)
    answer.raise_for_status()
    return answer.json()


def counted(server: SageServer) -> dict[str, int]:
    found: dict[str, int] = server.stats()["slo"]["num_by_class"]
    return found


def test_every_route_has_classes_and_ignores_untrusted_claims(server: SageServer) -> None:
    before = counted(server)
    said = [{"role": "user", "content": SHORT_PROMPT}]
    sampling = {"max_new_tokens": 2}
    served = requests.get(server.url + "/v1/models", timeout=60).json()["data"][0]["id"]
    say(server, "bulk", text=SHORT_PROMPT, sampling_params=sampling)
    say(server, "bulk", text=[SHORT_PROMPT] * 2, sampling_params={**sampling, "n": 2})
    chat = {"model": served, "max_tokens": 2}
    say(server, "interactive", "/v1/chat/completions", messages=said, **chat)
    say(server, "interactive", "/v1/completions", prompt=SHORT_PROMPT, **chat)
    say(server, "interactive", "/v1/messages", messages=said, **chat)
    say(server, "nobility", text=SHORT_PROMPT, sampling_params=sampling)
    # Neither the body's priority nor a forged class counts here.
    forged = {"__sage_hint_slo_class": "interactive", "__sage_came_s": 0.0, "slo_class": "bulk"}
    say(
        server,
        None,
        text=SHORT_PROMPT,
        priority=10,
        sampling_params={**sampling, "custom_params": forged},
    )
    after = counted(server)
    news = {name: after[name] - before.get(name, 0) for name in after}
    assert news == {"bulk": 3, "interactive": 3, "default": 2}
    assert server.stats()["num_malformed"] == 0


def test_who_claims_a_class_beyond_its_share_gets_the_default(server: SageServer) -> None:
    before = server.stats()["slo"]
    for _ in range(4):
        say(server, "rare", text=SHORT_PROMPT, sampling_params={"max_new_tokens": 1})
    after = server.stats()["slo"]
    assert after["num_demoted"] - before["num_demoted"] >= 3
    assert after["num_by_class"]["rare"] <= 1


def test_a_deadline_below_the_floor_is_clamped_counted_and_served(server: SageServer) -> None:
    before = server.stats()["slo"]["num_clamped"]
    sampling = {"custom_params": {"ttft_slo_ms": 0.001}}
    answer = generate(server, SHORT_PROMPT, 4, sampling_params=sampling)
    assert answer["meta_info"]["completion_tokens"] == 4
    assert server.stats()["slo"]["num_clamped"] == before + 1


def test_tenants_of_a_class_that_shares_fairly_take_turns(server: SageServer) -> None:
    asked = [
        partial(
            say,
            server,
            "bulk",
            tenant=rid[0],
            text=SHORT_PROMPT,
            rid=rid,
            sampling_params={"temperature": 0, "max_new_tokens": 4},
        )
        for rid in ("a 1", "a 2", "a 3", "b 1", "b 2")
    ]
    stage.together(server, asked)
    assert stage.started(server) == ["a 1", "b 1", "a 2", "b 2", "a 3"]
    assert server.stats()["num_policy_errors"] == 0


def test_attainment_by_class_is_in_server_info_and_metrics(server: SageServer) -> None:
    generate(server, SHORT_PROMPT, 4)
    say(server, "interactive", text=SHORT_PROMPT, sampling_params={"max_new_tokens": 4})
    slo = server.stats()["slo"]
    assert slo["tdg_ratio"] == 1.0  # an hour for the first token, a minute for each further one
    assert slo["tdg_ratio_by_class"]["interactive"] == 1.0
    assert set(slo["slo_attainment_by_class"]) >= {"default", "interactive"}
    assert "bulk" not in slo["slo_attainment_by_class"]  # nothing was promised to it
    assert slo["slo_attainment_by_metric"] == {"ttft": 1.0, "tpot": 1.0}
    text = requests.get(server.url + "/metrics", timeout=60).text
    series = dict(re.findall(r"^(sage:\w+\{[^}]*\}) (\S+)$", text, re.M))
    found = {name: value for name, value in series.items() if 'slo_class="interactive"' in name}
    assert {name.partition("{")[0] for name in found} == {
        "sage:slo_requests",
        "sage:slo_good_requests",
        "sage:slo_attainment",
        "sage:tdg_ratio",
    }
    assert any('metric="ttft"' in name for name in found)
    assert all(float(value) >= 1 for value in found.values())


def test_answers_under_tight_deadlines_stay_what_they_are(server: SageServer) -> None:
    """Budgets cut prompts, urgent requests go first, others yield: the tokens stay the same."""
    asked = [(f"{SHORT_PROMPT} Case {i}. " + "And so on. " * (i % 4) * 8, 40) for i in range(12)]
    sampling = [
        {"custom_params": {"ttft_slo_ms": 1000.0 + 50 * i, "tpot_slo_ms": 1.0 + 20 * (i % 4)}}
        for i in range(12)
    ]
    together = ask_together(server, asked, sampling)
    assert differences(ask(server, asked, 1), together)[0] == 0
    assert server.stats()["num_policy_errors"] == 0
    missed = server.stats()["slo"]
    assert missed["tdg_ratio"] <= 1.0


def test_those_of_more_weight_go_first_and_best_effort_last(server: SageServer) -> None:
    """All that were promised something are late, so urgent on any host."""
    names = {"bulk": "bulk", "late 1": "late", "high": "late-and-dear", "late 2": "late"}
    asked = [
        partial(
            say,
            server,
            slo_class,
            text=SHORT_PROMPT,
            rid=rid,
            sampling_params={"temperature": 0, "max_new_tokens": 4},
        )
        for rid, slo_class in names.items()
    ]
    stage.together(server, asked)
    assert stage.started(server) == ["high", "late 1", "late 2", "bulk"]
    assert server.stats()["num_policy_errors"] == 0


def test_gateways_and_agents_say_it_in_their_own_words(server: SageServer) -> None:
    """Class, tenant and deadline by llm-d; priority by Dynamo."""
    before = server.stats()["slo"]

    def call(rid: str, headers: dict[str, str], **body: Any) -> Any:
        return partial(
            requests.post,
            f"{server.url}/generate",
            headers={"x-llm-d-inference-objective": "bulk", **headers},
            json={"text": SHORT_PROMPT, "rid": rid, "sampling_params": {"max_new_tokens": 4}}
            | body,
            timeout=300,
        )

    fairly = [(f"{tenant} {i}", tenant) for i, tenant in enumerate("aab")]
    asked = [call(rid, {"x-llm-d-inference-fairness-id": tenant}) for rid, tenant in fairly]
    asked += [
        call("body", {}, nvext={"agent_hints": {"priority": 1, "osl": 4}}),
        call("header", {"x-dynamo-request-priority": "2"}),
    ]
    answers = stage.together(server, asked)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert stage.started(server) == ["header", "body", "a 0", "b 2", "a 1"]
    after = server.stats()["slo"]
    assert after["num_by_class"]["bulk"] - before["num_by_class"].get("bulk", 0) == 5
    hurried = {"x-llm-d-inference-objective": "default", "x-llm-d-slo-ttft-ms": "0.1"}
    assert call("hurried", hurried)().status_code == 200
    assert server.stats()["slo"]["num_clamped"] == before["num_clamped"] + 1
    refused = call("wrong", {"x-llm-d-slo-ttft-ms": "soon"})()
    assert refused.status_code == 400
    assert "x-llm-d-slo-ttft-ms" in refused.text
