from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor_store.cached_file import cache_folder, read_cached, write_cached
from predictor_store.predict import minilm


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "file"
    for content in (b"first", b"", b"\0" * 100_000):
        write_cached(file, content)
        assert read_cached(file) == content
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_a_damaged_file_is_none(tmp_path: Path, place: int) -> None:
    file = tmp_path / "file"
    write_cached(file, b"content")
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.write_bytes(damaged)
    assert read_cached(file) is None
    file.write_bytes(b"short")
    assert read_cached(file) is None


def test_what_another_could_have_placed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    write_cached(file, b"content")
    link.symlink_to(file)
    os.mkfifo(pipe)
    assert read_cached(link) is None
    assert read_cached(pipe) is None
    assert read_cached(tmp_path) is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_cached(file) is None


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    theirs, file = tmp_path / "theirs", tmp_path / "file"
    theirs.write_bytes(b"theirs")
    file.symlink_to(theirs)
    write_cached(file, b"ours")
    assert theirs.read_bytes() == b"theirs"
    assert read_cached(file) == b"ours"


def test_the_model_is_exported_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exports = []

    def export() -> bytes:
        exports.append(1)
        return b"graph"

    monkeypatch.setattr(minilm, "_export", export)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [minilm.exported_model() for _ in range(2)] == [b"graph"] * 2
    assert len(exports) == 1
    for file in cache_folder().iterdir():
        file.write_bytes(b"damaged")
    assert minilm.exported_model() == b"graph"
    assert len(exports) == 2


def test_without_room_for_it_the_model_is_exported_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sage-sched").write_bytes(b"a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(minilm, "_export", lambda: b"graph")
    assert minilm.exported_model() == b"graph"
    assert "at each start" in capsys.readouterr().err
