"""The JSON schema of settings: every accepted value is valid, and so are all samples."""

from __future__ import annotations

import json
import tomllib
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


def test_samples_are_valid() -> None:
    found: list[tuple[str, Any]] = [
        (page.name, block.code)
        for page in sorted(DOCS.glob("*.md"))
        for block in blocks(page, "toml")
        if not block.title  # else a file of another kind
    ]
    for one in yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text(encoding="utf-8")):
        if one["kind"] == "ConfigMap":
            found += one["data"].items()
    assert {name for name, _ in found} >= {"settings.md", "server.toml", "predictor.toml"}
    for _, text in found:
        VALID.validate(tomllib.loads(text))
        SageConfig.parse(tomllib.loads(text))


def test_values_are_described_and_wrong_ones_refused() -> None:
    assert [name for name, leaf in leaves(SCHEMA) if not leaf["description"]] == []
    for wrong in ({"max_gap": 1}, {"max_gap_ms": "1 s"}, {"max_gap_ms": 0.5}):
        assert not VALID.is_valid({"decode": wrong})


def test_a_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert main(["settings", "policy.sage"]) == 0  # and not those of policy.sagesched
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert names == ["policy.sage.ttft_ms", "policy.sage.regret"]
