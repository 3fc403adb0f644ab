"""The breaks of tests/mutations.py fit the code as it is."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks)
def test_what_is_broken_is_there(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1
    assert mutation.new != mutation.old
    file, *names = mutation.test.split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert all(f"def {name}(" in text or f"class {name}" in text for name in names)
