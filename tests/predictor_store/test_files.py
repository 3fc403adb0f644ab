"""Files of settings, and files that only their owner reads and writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor_store.cached_file import cache_folder, expanded, read_own, replace_own
from predictor_store.config_file import read_config
from sage_sched.app.config import SageConfig
from sage_sched.fields import ConfigError
from sage_sched.policies.sage import SageParameters


def test_no_file_means_the_defaults() -> None:
    assert read_config(None) == SageConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sage.toml", "[policy.sage]\nregret = 3.0\n[store]\ncapacity = 7\n"),
        ("sage.yaml", "policy: {sage: {regret: 3.0}}\nstore:\n  capacity: 7\n"),
    ],
)
def test_toml_and_yaml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = read_config(str(tmp_path / name))
    assert (config.policy, config.store.capacity) == ({"sage": SageParameters(regret=3.0)}, 7)


@pytest.mark.parametrize("name", ["sage.toml", "sage.yml"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert read_config(str(tmp_path / name)) == SageConfig()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sage.toml", b"[policy\n"),
        ("sage.toml", b"\xff\xfe"),
        ("sage.toml", b'[policy.sage]\nregret = "long"\n'),
        ("sage.toml", b"a = " + b"9" * 5000),
        ("sage.toml", b'[store]\npath = "~"\0'),
        ("sage.yaml", b"policy: [\n"),
        ("sage.yaml", b"- 1\n"),
        ("sage.yaml", b"store: {capacity: " + b"9" * 5000 + b"}"),
        ("sage.yaml", b"store: 2024-13-45"),
        ("sage.yaml", b"store: !!timestamp x"),
        ("sage.yaml", b"slo: {classes: {1: {}, 2: {priority: 1}}}"),
        ("sage.yaml", b"policy: {null: {}}"),
        ("sage.json", b"{}"),
        ("missing.toml", None),
    ],
)
def test_an_error_is_one_line_that_names_the_file(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name) as error:
        read_config(str(tmp_path / name))
    assert "\n" not in str(error.value)


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
