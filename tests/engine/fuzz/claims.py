"""Clients' claims of importance: all allowed, many odd."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sage_sched.job import LEAST_SLO_MS, LEAST_WEIGHT, MAX_NAME_CHARACTERS, MOST_SLO_MS, MOST_WEIGHT

# Of a server's settings: classes, and that clients are trusted.
SETTINGS = """
[hints]
trust = "body"
[slo]
trust = "header"
default = "std"
[slo.classes.gold]
priority = 2
weight = 4.0
ttft_slo_ms = 300.0
tpot_slo_ms = 40.0
max_share = 0.3
urgency = 1
fair = true
[slo.classes.std]
priority = 1
ttft_slo_ms = 2000.0
tpot_slo_ms = 200.0
fair = true
[slo.classes.batch]
priority = 0
urgency = 5
"""
_NAMES = ("", "a", "b", "ü𝄞", "x" * MAX_NAME_CHARACTERS, "\u202e", 'a"b\\', "0", " ")
_SLOS_MS = (LEAST_SLO_MS, 30.0, 1000.0, MOST_SLO_MS)
_HINTS: Mapping[str, tuple[Any, ...]] = {
    "urgency": (1, 1, 2, 3, 4, 5),
    "weight": (LEAST_WEIGHT, 0.1, 1, 2, MOST_WEIGHT),
    "ttft_slo_ms": _SLOS_MS,
    "tpot_slo_ms": _SLOS_MS,
    "tenant": _NAMES,
    "session": _NAMES,
    # Reserved: a client's value is dropped.
    "__sage_lengths": ([1],),
    "__sage_hint_urgency": (1,),
    "__sage_came_s": (0.0,),
}
_HEADERS = {
    "X-SMG-Priority": ("gold", "std", "batch", "none", "", "x" * 500),
    "X-Sage-Tenant": ("a", "b", "c", "%%", "x" * 2000),
}
_PRIORITIES = (None, None, -(2**31), -1, 0, 1, 2, 5, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of one request. custom_params, headers: read by the policy. priority: SGLang's own
    field; None: absent."""

    custom_params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    priority: int | None = None


NO_CLAIMS = Claims()


def draw_claims(rng: random.Random) -> Claims:
    """Some of each."""
    return Claims(_some(_HINTS, rng), _some(_HEADERS, rng), rng.choice(_PRIORITIES))


def _some(choices: Mapping[str, tuple[Any, ...]], rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
