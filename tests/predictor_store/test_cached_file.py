from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor_store.cached_file import cache_folder, expanded, read_own, replace_own


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "file"
    for content in (b"first", b"", b"\0" * 100_000):
        replace_own(file, content)
        assert read_own(file) == content
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_only_own_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    replace_own(file, b"content")
    link.symlink_to(file)
    os.mkfifo(pipe)
    for theirs in (link, pipe, tmp_path):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            read_own(theirs)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="own"):
        read_own(file)


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    theirs, file = tmp_path / "theirs", tmp_path / "file"
    theirs.write_bytes(b"theirs")
    file.symlink_to(theirs)
    replace_own(file, b"ours")
    assert theirs.read_bytes() == b"theirs"
    assert read_own(file) == b"ours"


@pytest.mark.parametrize("path", ["~/x", "~nobody-at-all/x", "/tmp/\0x"])
def test_impossible_paths_say_why(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has neither HOME nor an entry in passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(OSError, match=r"HOME|no name"):
        expanded(path)
    with pytest.raises(OSError, match="HOME"):
        cache_folder()
