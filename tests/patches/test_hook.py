from __future__ import annotations

from pathlib import Path

import pytest

from patches.compat import UnsupportedServerError
from patches.hook import check_target, harmless


def test_a_misfit_says_which_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "needs.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    for target, why in (
        ("hooked.needs.call", "No module named 'not_installed'"),
        ("hooked.none.call", "has no attribute 'none'"),
        ("none.call", "No module named 'none'"),
    ):
        with pytest.raises(UnsupportedServerError, match=why):
            check_target("hook", target, ())


def test_the_first_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    guarded = harmless(lambda number: 1 // number)
    assert [guarded(number) for number in (1, 0, 0)] == [1, None, None]
    assert len(caplog.records) == 1
