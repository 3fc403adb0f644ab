from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
# As SGLang does it, started by `python -m` in some folder: that folder comes first on sys.path.
CODE = f"""
import sys
sys.path[:0] = ["", {str(ROOT)!r}]
from sage_sched.shadow import warn
warn()
"""


def said_in(folder: Path) -> str:
    command = [sys.executable, "-c", CODE]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def test_a_users_own_package_in_the_place_of_ours_is_named(tmp_path: Path) -> None:
    assert said_in(tmp_path) == ""
    # A folder without an __init__.py does not come before ours.
    theirs = tmp_path / "patches"
    theirs.mkdir()
    assert said_in(tmp_path) == ""
    (theirs / "__init__.py").write_text("raise RuntimeError('not to be run')")
    said = said_in(tmp_path)
    assert str(theirs) in said
    assert "python -P" in said


def test_sglang_finds_it() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="sage_sched_shadow")
    assert found.value == "sage_sched.shadow:warn"
