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


def test_only_own_files_are_read_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    replace_own(file, b"theirs")
    link.symlink_to(file)
    os.mkfifo(pipe)
    for theirs in (link, pipe, tmp_path):
        with pytest.raises(OSError):  # noqa: PT011 - of several kinds
            read_own(theirs)
    replace_own(link, b"ours")
    assert (read_own(link), read_own(file)) == (b"ours", b"theirs")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="own"):
        read_own(file)


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
