"""One SGLang release, named alike wherever a tool needs its name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from patches.compat import SUPPORTED_RELEASES

ROOT = Path(__file__).parents[1]


def test_the_pinned_sglang_is_a_supported_one() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gpu = [name for name in project["optional-dependencies"]["gpu"] if name.startswith("sglang")]
    assert pins["sglang"] in SUPPORTED_RELEASES
    assert gpu == [f"sglang=={pins['sglang']}"]


def test_everything_that_pyproject_names_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [
        *project["dependencies"],
        *extras["cpu"],
        *extras["bench"],
        *extras["docs"],
        *extras["test"],
    ]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
    }
    assert [name for name in names if name.lower().replace("_", "-") not in pinned] == []


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
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
