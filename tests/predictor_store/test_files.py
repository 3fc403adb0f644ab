from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor_store.cached_file import cache_folder, expanded, read_own, replace_own
from predictor_store.config_file import read_config
from predictor_store.store.store import default_path, folder_of
from sage_sched.app.config import SageConfig, StoreConfig
from sage_sched.fields import ConfigError
from sage_sched.policies.sage import SageParameters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sage.toml", "[policy.sage]\nregret = 3.0\n[store]\ncapacity = 7\n"),
        ("sage.yaml", "policy: {sage: {regret: 3.0}}\nstore:\n  capacity: 7\n"),
        ("sage.toml", ""),
        ("sage.yml", ""),
    ],
)
def test_toml_and_yaml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    said = SageConfig(StoreConfig(capacity=7), policy={"sage": SageParameters(regret=3.0)})
    assert read_config(str(tmp_path / name)) == (said if text else read_config(None))
    assert read_config(None) == SageConfig()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.toml", b"[policy\n"), ("a.toml", b"\xff\xfe"), ("a.toml", b"a = " + b"9" * 5000),
        ("a.toml", b'[policy.sage]\nregret = "long"\n'), ("a.toml", b'[store]\npath = "~"\0'),
        ("a.yaml", b"policy: [\n"), ("a.yaml", b"- 1\n"), ("a.yaml", b"store: 2024-13-45"),
        ("a.yaml", b"store: {capacity: " + b"9" * 5000 + b"}"),
        ("a.yaml", b"store: !!timestamp x"), ("a.yaml", b"policy: {null: {}}"),
        ("a.yaml", b"slo: {classes: {1: {}, 2: {priority: 1}}}"),
        ("a.json", b"{}"), ("missing.toml", None),
    ],
)  # fmt: skip
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
        assert (read_own(file), read_own(file, 3)) == (content, content[:3])
    assert (file.parent.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    (file.parent / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_own(file.parent / "folder", b"")
    assert {path.name for path in file.parent.iterdir()} == {"file", "folder"}


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


def test_a_path_is_made_absolute_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expanded("x") == tmp_path / "x"
    for variable, folder in (("HOME", ".cache/"), ("XDG_CACHE_HOME", "")):
        monkeypatch.setenv("XDG_CACHE_HOME", "")  # the same as unset
        monkeypatch.setenv(variable, str(tmp_path))
        assert default_path() == tmp_path / f"{folder}sage-sched/store"
    assert folder_of(StoreConfig("~/mine")) == tmp_path / "mine"
    # The user has neither HOME nor an entry in passwd.
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    for path in ("~/x", "~nobody-at-all/x", "/tmp/\0x"):
        with pytest.raises(OSError, match=r"HOME|not a file name"):
            expanded(path)
    with pytest.raises(OSError, match="HOME"):
        cache_folder()
