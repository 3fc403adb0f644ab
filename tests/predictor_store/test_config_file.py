from __future__ import annotations

from pathlib import Path

import pytest

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


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    for name in ("sage.toml", "sage.yml"):
        (tmp_path / name).write_text("")
        assert read_config(str(tmp_path / name)) == SageConfig()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sage.toml", b"[policy\n"),
        ("sage.yaml", b"policy: [\n"),
        ("sage.yaml", b"- 1\n"),
        ("sage.toml", b"\xff\xfe"),
        ("sage.json", b"{}"),
        ("sage.toml", b'[policy.sage]\nregret = "long"\n'),
        ("sage.toml", b"a = " + b"9" * 5000),
        ("sage.yaml", b"store: {capacity: " + b"9" * 5000 + b"}"),
        ("sage.yaml", b"store: 2024-13-45"),
        ("sage.yaml", b"store: !!bool x"),
        ("sage.yaml", b"store: !!timestamp x"),
        ("sage.yaml", b"slo: {classes: {1: {}, 2: {priority: 1}}}"),
        ("sage.yaml", b"policy: {null: {}}"),
        ("sage.toml", b'[store]\npath = "~"\n'[:-1] + b"\0"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_config(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("sage.toml", "[store]\npath = \n", "it is not TOML: Invalid value (at line 2, column 8)"),
        ("sage.yaml", "store:\n  path: [\n", "it is not YAML: while parsing"),
    ],
)
def test_a_syntax_error_is_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(str(tmp_path / name))
    assert str(error.value).startswith(f"--sage-config {tmp_path / name}: {said}")
    assert "line" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_config(str(tmp_path / "nowhere.toml"))
