"""The JSON schema of settings: every accepted value is valid, and so are all samples."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from sage_sched.app.config import SageConfig
from sage_sched.app.schema import json_schema, leaves
from sage_sched.cli import main
from tests.pages import DOCS, blocks

SCHEMA = json_schema()
VALID = Draft202012Validator(SCHEMA)


def samples() -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings files in docs, each with its place."""
    for page in sorted(DOCS.glob("*.md")):
        for block in blocks(page, "toml"):
            if not block.title:  # a file of another kind
                yield page.name, tomllib.loads(block.code)
    for one in yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text(encoding="utf-8")):
        if one["kind"] == "ConfigMap":
            yield from ((name, tomllib.loads(text)) for name, text in one["data"].items())


def test_samples_are_valid() -> None:
    found = [*samples()]
    assert {place for place, _ in found} >= {"settings.md", "server.toml", "predictor.toml"}
    for _, sample in found:
        VALID.validate(sample)
        SageConfig.parse(sample)


def test_it_refuses_a_typo_a_wrong_unit_and_a_value_out_of_range() -> None:
    for wrong in ({"max_gap": 1}, {"max_gap_ms": "1 s"}, {"max_gap_ms": 0.5}):
        assert not VALID.is_valid({"decode": wrong})


def test_every_value_is_described() -> None:
    assert [name for name, leaf in leaves(SCHEMA) if not leaf["description"]] == []


def test_a_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["settings", "decode"]) == 0
    assert capsys.readouterr().out.startswith("decode.max_gap_ms = 1000.0\n")
