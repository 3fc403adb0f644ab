"""One SGLang release, named alike wherever a tool needs its name."""

from __future__ import annotations

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
    names = [*project["dependencies"], *extras["cpu"], *extras["bench"], *extras["test"]]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.txt").read_text().splitlines()
    }
    assert [name for name in names if name.lower().replace("_", "-") not in pinned] == []
