"""Packages that only benches and tests have, each known to the servers that are started with its
environment: SGLang plugins, and policies of a third party. The product has no switch for what they
do."""

from __future__ import annotations

import os
from pathlib import Path

from sage_sched.registry import ENTRY_POINT_GROUP


def install(folder: Path, module: str) -> dict[str, str]:
    """Make a module's register() known as a plugin; the environment of the servers that load it,
    beside those that this process's environment has already. Done twice it is as done once."""
    name = module.rpartition(".")[2]
    return _installed(folder, name, "sglang.srt.plugins", f"{module}:register")


def install_policy(folder: Path, name: str, source: str) -> dict[str, str]:
    """The same for a policy of this name. source: its class, as module:class."""
    return _installed(folder, name, ENTRY_POINT_GROUP, source)


def _installed(folder: Path, name: str, group: str, source: str) -> dict[str, str]:
    """A package with one entry point. Two in one folder have one environment."""
    info = folder.absolute() / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {source}\n", encoding="utf-8")
    root = Path(__file__).parents[3]
    path = [str(info.parent), str(root), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
