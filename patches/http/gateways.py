"""Reads hints that gateways and agents give in headers and fields of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sage_sched.job import LEAST_SLO_MS, MOST_SLO_MS

# Header to hint (sage_sched.job.CLIENTS_HINTS), or to `priority` of the body. If several headers
# give the same hint, the last one in this table is used.
HEADERS = {
    "x-session-id": "session",  # OpenCode
    "session-id": "session",  # Codex, like the next one
    "thread-id": "session",
    "x-claude-code-session-id": "session",
    "x-dynamo-session-id": "session",
    "x-dynamo-request-priority": "priority",
    # The Gateway API inference extension, and llm-d before it had names of its own.
    "x-slo-ttft-ms": "ttft_slo_ms",
    "x-slo-tpot-ms": "tpot_slo_ms",
    "x-llm-d-slo-ttft-ms": "ttft_slo_ms",
    "x-llm-d-slo-tpot-ms": "tpot_slo_ms",
    "x-llm-d-inference-fairness-id": "tenant",
    "x-smg-tenant-id": "tenant",
}
# The same mapping for fields of `nvext.agent_hints` (NVIDIA Dynamo). `expected_tokens` is no
# hint but the expected length of the answer.
AGENT_HINTS = {"priority": "priority", "osl": "expected_tokens"}
# Headers that name an SLO class. The first one present is used.
CLASS_HEADERS = ("x-smg-priority", "x-llm-d-inference-objective")
# How long a request may wait (llm-d): a Go duration, such as 1m30s.
TTL_HEADER = "x-llm-d-inference-ttl"
_MS = {"h": 3.6e6, "m": 6e4, "s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|ns|h|m|s)")
_PARSED: Mapping[str, type[Any]] = {"priority": int, "ttft_slo_ms": float, "tpot_slo_ms": float}
# For each whole number: its name in messages, its minimum and its maximum. Trap: a priority beyond
# SGLang's range ends a scheduler, and SGLang checks only the one in the body.
_NUMBERS = {
    "priority": ("a priority", -(2**63), 2**63 - 1),
    "expected_tokens": ("nvext.agent_hints.osl", 1, 2**31 - 1),
}


def gateway_hints(trust: str, headers: Mapping[str, str], body: object) -> dict[str, Any]:
    """Return the hints that hints.trust allows, by our names. Headers override the body. Raises
    ValueError."""
    if trust == "none":
        return {}
    found: dict[str, Any] = {}
    match body:
        case {"nvext": {"agent_hints": dict() as hints}} if trust == "body":
            found = {ours: hints[name] for name, ours in AGENT_HINTS.items() if name in hints}
    for name, ours in HEADERS.items():
        if value := headers.get(name):
            try:
                found[ours] = _PARSED.get(ours, str)(value)
            except ValueError:
                raise ValueError(f"{name} is {value!r:.40}, allowed: a number") from None
    for ours, (theirs, least, most) in _NUMBERS.items():
        value = found.get(ours, 1)
        if type(value) is not int or not least <= value <= most:
            allowed = f"a whole number from {least} to {most}"
            raise ValueError(f"{theirs} is {value!r:.40}, allowed: {allowed}")
    return found


def gateway_class(headers: Mapping[str, str]) -> str | None:
    """Return the SLO class that a header names, or None."""
    return next((headers[name] for name in CLASS_HEADERS if name in headers), None)


def max_wait_ms(trust: str, headers: Mapping[str, str]) -> float | None:
    """Return how long a request may wait; None for no limit. As under llm-d, a header that is no
    duration above 0 is ignored.

    trust: slo.trust, because a limit is part of the promise to a request.
    """
    text = headers.get(TTL_HEADER, "").strip()
    if trust != "header" or not re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        return None
    total_ms = sum(float(number) * _MS[unit] for number, unit in _DURATION.findall(text))
    return total_ms if LEAST_SLO_MS <= total_ms <= MOST_SLO_MS else None
