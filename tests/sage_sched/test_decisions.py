"""A decision table: situations, and the plans of their passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sage_sched.situations import ByInput, decided

_TEXT = Path(__file__).with_name("decisions.txt").read_text(encoding="utf-8")


def decisions() -> Iterator[tuple[str, str, str]]:
    """The policy with its parameters, the situation and the plan of each line."""
    policy = ""
    for line in _TEXT.splitlines():
        if line.startswith("["):
            policy = line.strip("[]")
        elif line and not line.startswith("#"):
            situation, _, plan = line.partition(" ->")
            yield policy, situation, plan.strip()


@pytest.mark.parametrize(("policy", "situation", "plan"), [*decisions()])
def test_a_pass_decides(policy: str, situation: str, plan: str) -> None:
    name, *parameters = policy.split() or [ByInput]
    given = {key: float(value) for key, value in (each.split("=") for each in parameters)}
    assert decided(situation, name, **given) == plan
