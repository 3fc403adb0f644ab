"""The canary on releases that are the installed one, but for names that a test changes."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from tests.checks import canary

pytestmark = pytest.mark.slow

RELEASE = "9.9.9"


def release(folder: Path, renamed: dict[str, tuple[str, str]]) -> None:
    """A release below `folder`. renamed: by file, a name that this release has for another. All
    other files are links to those installed."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent
    ours = folder / RELEASE / "sglang"
    ours.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("srt", "version.py", "__pycache__"):
            (ours / path.name).symlink_to(path)
    shutil.copytree(source / "srt", ours / "srt", copy_function=_link)
    (ours / "version.py").write_text(f'__version__ = "{RELEASE}"\n', encoding="utf-8")
    for file, (old, new) in renamed.items():
        text = (ours / file).read_text(encoding="utf-8")
        assert old in text
        (ours / file).unlink()
        (ours / file).write_text(re.sub(rf"\b{old}\b", new, text), encoding="utf-8")


def _link(source: str, destination: str) -> None:
    Path(destination).symlink_to(source)


def test_only_renamed_hooks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    renamed = {
        "srt/managers/scheduler.py": ("_abort_on_queued_limit", "_refuse_beyond_limit"),
        "srt/managers/tokenizer_manager.py": ("_handle_batch_output", "_on_batch_output"),
    }
    release(tmp_path, renamed)
    assert canary.main(["--release", RELEASE, "--folder", str(tmp_path)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert "Scheduler._abort_on_queued_limit of SGLang 9.9.9 is not there" in first
    assert "TokenizerManager._handle_batch_output of SGLang 9.9.9 is not there" in second
    assert last == "SGLang 9.9.9: 2 misfits"
