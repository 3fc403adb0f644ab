"""Packages that only tests have, each known to the servers that are started with its environment:
SGLang plugins, and policies of a third party. The product has no switch for what they do."""

from __future__ import annotations

import os
from pathlib import Path

from sage_sched.policy import ENTRY_POINT_GROUP


def install(folder: Path, module: str) -> dict[str, str]:
    """Make a module's register() known as a plugin; the environment of the servers that load it,
    beside those that this process's environment has already."""
    name = module.rpartition(".")[2]
    return _installed(folder, name, "sglang.srt.plugins", f"{module}:register")


def install_policy(folder: Path, name: str, source: str) -> dict[str, str]:
    """The same for a policy of this name. source: its class, as module:class."""
    return _installed(folder, name, ENTRY_POINT_GROUP, source)


def _installed(folder: Path, name: str, group: str, source: str) -> dict[str, str]:
    """A package with one entry point. Two in one folder have one environment."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {source}\n")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}
