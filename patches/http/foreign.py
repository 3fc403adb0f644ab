"""What gateways and agents say of a request in their own headers and fields, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Header: the hint of ours (sage_sched.job.CLIENTS_HINTS), or `priority` of the body, that it
# gives. Of several that give the same, the last one counts.
HEADERS = {
    "x-session-id": "session",  # OpenCode
    "session-id": "session",  # Codex, as is the next one
    "thread-id": "session",
    "x-claude-code-session-id": "session",
    "x-dynamo-session-id": "session",
    "x-dynamo-request-priority": "priority",
    "x-llm-d-slo-ttft-ms": "ttft_slo_ms",
    "x-llm-d-slo-tpot-ms": "tpot_slo_ms",
    "x-llm-d-inference-fairness-id": "tenant",
    "x-smg-tenant-id": "tenant",
}
# Field of `nvext.agent_hints` (NVIDIA Dynamo): the same, or how many tokens are expected.
AGENT_HINTS = {"priority": "priority", "osl": "expected_tokens"}
# Headers that name a class, the first one that is there.
CLASS_HEADERS = ("x-smg-priority", "x-llm-d-inference-objective")
_PARSED: Mapping[str, type[Any]] = {"priority": int, "ttft_slo_ms": float, "tpot_slo_ms": float}
# Whole numbers: by whose name, from and to. Beyond those of SGLang a priority ends a scheduler, and
# SGLang looks at the body's own alone.
_NUMBERS = {
    "priority": ("a priority", -(2**63), 2**63 - 1),
    "expected_tokens": ("nvext.agent_hints.osl", 1, 2**31 - 1),
}


def told(trust: str, headers: Mapping[str, str], body: object) -> dict[str, Any]:
    """By our names, as far as hints.trust goes; headers come before the body. Raises ValueError."""
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


def slo_class(headers: Mapping[str, str]) -> str | None:
    """The class that headers name, None if none."""
    return next((headers[name] for name in CLASS_HEADERS if name in headers), None)
