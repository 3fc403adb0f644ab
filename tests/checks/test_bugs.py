"""The bugs of bugs.toml fit the current code."""

from __future__ import annotations

import pytest

from tests.checks.bugs import BUGS, ROOT


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_can_be_put_back(name: str) -> None:
    bug = BUGS[name]
    assert (ROOT / bug.file).read_text().count(bug.right) == 1
    assert (ROOT / bug.tests).is_file()
