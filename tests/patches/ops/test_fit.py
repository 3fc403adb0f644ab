from __future__ import annotations

import re
from pathlib import Path

import pytest

from patches.compat import SUPPORTED_RELEASES, UnsupportedServerError
from patches.hook import check_target
from tests.nursery import Nursery

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_the_installed_sglang_fits(nursery: Nursery) -> None:
    # In a process of its own, as it imports much of SGLang.
    done = nursery.run("from patches.ops.fit import main; assert main() == 0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" fits")


def test_the_page_names_the_releases_that_are_supported() -> None:
    supported = re.findall(r"^\| (0\.\S+) \| supported", PAGE.read_text(), re.M)
    assert sorted(supported) == sorted(SUPPORTED_RELEASES)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wanting").mkdir()
    (tmp_path / "wanting" / "__init__.py").write_text("")
    (tmp_path / "wanting" / "batch.py").write_text("import not_installed_here\nclass Batch: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedServerError, match="No module named 'not_installed_here'"):
        check_target("hook", "wanting.batch.Batch.run", ())
    with pytest.raises(UnsupportedServerError, match="has no attribute 'Batch'"):
        check_target("hook", "wanting.Batch.run", ())
