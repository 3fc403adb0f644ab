"""No decision of a policy, and no simulated time, changes unnoticed."""

from __future__ import annotations

import json

import pytest

from tests.checks.fingerprint import RECORDED, cases, digest

_KNOWN: dict[str, str] = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", sorted({*_KNOWN, *cases()}))
def test_results_are_as_recorded(name: str) -> None:
    assert digest(cases()[name]()) == _KNOWN[name], "see tests/checks/fingerprint.py"
