"""No decision of a policy, and no simulated time, changes unnoticed."""

from __future__ import annotations

import json
import platform
import sys

import pytest

from tests.checks.fingerprint import RECORDED, cases, digest

_KNOWN: dict[str, str] = json.loads(RECORDED.read_text())


@pytest.mark.skipif(
    sys.version_info >= (3, 12) or platform.machine() != "x86_64",
    reason="the results are recorded with Python 3.11 on x86: others may round sums otherwise",
)
@pytest.mark.parametrize("name", sorted({*_KNOWN, *cases()}))
def test_results_are_as_recorded(name: str) -> None:
    assert digest(cases()[name]()) == _KNOWN[name], "see tests/checks/fingerprint.py"
