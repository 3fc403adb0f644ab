"""One SGLang release, named alike wherever a tool needs its name."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES
from tests.checks import lock

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"


def test_the_pinned_sglang_is_a_supported_one() -> None:
    pins = dict(pin.split("==") for pin in lock.read(ROOT / "requirements.txt"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gpu = [name for name in project["optional-dependencies"]["gpu"] if name.startswith("sglang")]
    assert pins["sglang"] in SUPPORTED_RELEASES
    assert gpu == [f"sglang=={pins['sglang']}"]
    (others,) = re.findall(r"^OTHER_RELEASES \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert sorted([*others.split(), pins["sglang"]]) == sorted(SUPPORTED_RELEASES)


def test_everything_that_pyproject_names_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [
        *project["dependencies"],
        *(name for extra in ("cpu", "minilm", "plots", "docs", "test") for name in extras[extra]),
    ]
    pins = {pin.lower().replace("_", "-") for pin in lock.read(ROOT / "requirements.txt")}
    pinned = {pin.split("==")[0] for pin in pins}
    wanted = [name.lower().replace("_", "-") for name in names]
    assert [name for name in wanted if name not in (pins if "==" in name else pinned)] == []


def test_every_pin_has_hashes_and_pip_is_told_to_demand_them() -> None:
    assert [
        pin for pin, digests in lock.read(ROOT / "requirements.txt").items() if not digests
    ] == []
    installs = re.findall(r"pip install .*-r requirements.txt", (ROOT / "Makefile").read_text())
    assert len(installs) == 1
    assert "--require-hashes" in installs[0]


def test_what_the_makefile_imports_is_there() -> None:
    """A marked set-up runs on fresh machines only."""
    snippets = re.findall(r"python -c '([^']+)'", (ROOT / "Makefile").read_text())
    imports = [
        node
        for snippet in snippets
        for node in ast.walk(ast.parse(snippet))
        if isinstance(node, ast.ImportFrom)
    ]
    assert len(imports) == len(snippets) > 0
    for node in imports:
        module = importlib.import_module(f"{node.module}")
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_container_is_of_a_supported_release_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    release = re.search(r"^ARG SGLANG_RELEASE=(\S+)$", text, re.M)
    assert release is not None
    assert release[1] in SUPPORTED_RELEASES
    users = re.findall(r"^USER (\S+)$", text, re.M)
    assert users[-1] == "sage"
    assert text.index("USER sage") < text.index("ENTRYPOINT")
    assert '["sage-sched", "serve"]' in text


def test_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", CHANGELOG.read_text(), re.M)
    assert released[0] == version
