from __future__ import annotations

import re
from typing import Any

import pytest

from patches.http.gateways import CLASS_HEADERS, HEADERS, gateway_class, gateway_hints, max_wait_ms

SAID = {"session-id": "", "x-llm-d-slo-ttft-ms": "250", "x-smg-tenant-id": "a",
        "x-dynamo-request-priority": "-3"}  # fmt: skip
BODY = {"nvext": {"agent_hints": {"osl": 40, "priority": 0, "latency_sensitivity": 1.0}}}


def test_headers_and_the_body_count_if_they_are_trusted() -> None:
    by_header = {"ttft_slo_ms": 250.0, "tenant": "a", "priority": -3}
    assert gateway_hints("none", SAID, BODY) == {}
    assert gateway_hints("header", SAID, BODY) == by_header
    assert gateway_hints("body", SAID, BODY) == {**by_header, "expected_tokens": 40}
    assert gateway_hints("body", {}, BODY) == {"priority": 0, "expected_tokens": 40}
    for other in (None, [], {"nvext": 1}, {"nvext": {"agent_hints": [1]}}):
        assert gateway_hints("body", {}, other) == {}


def test_the_last_of_several_headers_counts() -> None:
    by_hint = {
        "session": "x-session-id session-id thread-id x-claude-code-session-id x-dynamo-session-id",
        "priority": "x-dynamo-request-priority", "ttft_slo_ms": "x-slo-ttft-ms x-llm-d-slo-ttft-ms",
        "tpot_slo_ms": "x-slo-tpot-ms x-llm-d-slo-tpot-ms",
        "tenant": "x-llm-d-inference-fairness-id x-smg-tenant-id",
    }  # fmt: skip
    for hint, headers in by_hint.items():
        for name in headers.split():
            assert [*gateway_hints("header", {name: "1"}, None)] == [hint]
    given = {name: f"{number}" for number, name in enumerate(HEADERS)}
    assert gateway_hints("header", given, None) == {
        "session": "4", "priority": 5, "ttft_slo_ms": 8.0, "tpot_slo_ms": 9.0, "tenant": "11",
    }  # fmt: skip
    assert gateway_class({name: name for name in CLASS_HEADERS}) == "x-smg-priority"
    assert gateway_class({}) is None


@pytest.mark.parametrize(
    ("headers", "hints", "named"),
    [
        ({"x-llm-d-slo-tpot-ms": "soon"}, {}, "x-llm-d-slo-tpot-ms"),
        ({"x-dynamo-request-priority": "1.5"}, {}, "x-dynamo-request-priority"),
        ({}, {"osl": "many"}, "many"),
        ({}, {"osl": 0}, "osl"),
        ({}, {"osl": 2**31}, "osl"),
        ({}, {"priority": True}, "True"),
        ({}, {"priority": 2**63}, f"{2**63}"),
        ({"x-dynamo-request-priority": f"{-(2**63) - 1}"}, {}, f"{-(2**63) - 1}"),
    ],
)
def test_bad_hints_are_refused(headers: dict[str, str], hints: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        gateway_hints("body", headers, {"nvext": {"agent_hints": hints}})


@pytest.mark.parametrize(
    ("given", "limit_ms"),
    [
        ("1500ms", 1500), (" 1m1.5s ", 61_500), (".5s", 500), ("2h", 7.2e6), ("20us", 0.02),
        ("0s", None), ("-1s", None), ("5", None), ("", None), ("soon", None), ("1 s", None),
        ("9" * 400 + "h", None), ("1" * 65_000, None),
    ],
)  # fmt: skip
def test_a_limit_of_waiting_is_a_go_duration_above_0(given: str, limit_ms: float | None) -> None:
    headers = {"x-llm-d-inference-ttl": given}
    assert max_wait_ms("header", headers) == limit_ms
    assert max_wait_ms("body", headers) is max_wait_ms("header", {}) is None
