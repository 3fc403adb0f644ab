from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor_store.cached_file import cache_folder, expanded, made_once, read_own, replace_own


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "file"
    for content in (b"first", b"", b"\0" * 100_000):
        replace_own(file, content)
        assert read_own(file) == content
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["file"]


def test_what_another_could_have_placed_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_what_is_slow_to_make_is_made_once_and_again_if_it_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: int
) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"made"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [made_once("file", "making it", make) for _ in range(2)] == [b"made"] * 2
    assert len(made) == 1
    (file,) = cache_folder().iterdir()
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    for content in (bytes(damaged), b"short"):
        file.write_bytes(content)
        made.clear()
        assert made_once("file", "making it", make) == b"made"
        assert len(made) == 1


def test_without_room_for_it_it_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sage-sched").write_bytes(b"a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert made_once("file", "making it", lambda: b"made") == b"made"
    assert "at each start" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["~/x", "~nobody-at-all/x", "/tmp/\0x"])
def test_where_no_file_can_be_it_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the user has neither HOME nor an entry in passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(OSError, match=r"HOME|no name"):
        expanded(path)
    with pytest.raises(OSError, match="HOME"):
        cache_folder()
    assert made_once("file", "making it", lambda: b"made") == b"made"
