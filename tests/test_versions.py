"""All tools name the same SGLang release."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES
from tests.checks import lock

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Hashes by `name==version`.
PINS = lock.read(ROOT / "requirements.txt")


def test_the_pinned_sglang_is_a_supported_one() -> None:
    (pinned,) = (pin.removeprefix("sglang==") for pin in PINS if pin.startswith("sglang=="))
    assert f"sglang=={pinned}" in EXTRAS["gpu"]
    (others,) = re.findall(r"^OTHER_RELEASES \?= (.*)$", MAKEFILE, re.M)
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    supported = re.findall(r"^\| (0\.\S+) \| supported", page, re.M)
    assert sorted([*others.split(), pinned]) == sorted(supported) == sorted(SUPPORTED_RELEASES)


def test_everything_that_pyproject_names_is_pinned_with_hashes() -> None:
    asked = [PROJECT["dependencies"], *map(EXTRAS.get, ("cpu", "minilm", "plots", "docs", "test"))]
    wanted = [name.lower().replace("_", "-") for names in asked for name in names]
    pins = {pin.lower().replace("_", "-") for pin in PINS}
    known = pins | {pin.split("==")[0] for pin in pins}
    assert [name for name in wanted if name not in known] == []
    assert [pin for pin, digests in PINS.items() if not digests] == []
    (install,) = re.findall(r"pip install .*-r requirements.txt", MAKEFILE)
    assert "--require-hashes" in install


def test_imports_of_the_makefile_exist() -> None:
    """The Makefile runs its set-up on fresh machines only."""
    snippets = re.findall(r"python -c '([^']+)'", MAKEFILE)
    nodes = [node for snippet in snippets for node in ast.walk(ast.parse(snippet))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(snippets) > 0
    for node in imports:
        module = importlib.import_module(f"{node.module}")
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_container_is_of_a_supported_release_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (release,) = re.findall(r"^ARG SGLANG_RELEASE=(\S+)$", text, re.M)
    assert release in SUPPORTED_RELEASES
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "sage"
    assert text.index("USER sage") < text.index('ENTRYPOINT ["sage-sched", "serve"]')


def test_one_version_everywhere() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", changelog, re.M)
    assert released[0] == PROJECT["version"]
