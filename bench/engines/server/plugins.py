"""Registers SGLang plugins and third-party policies of benches and tests, for servers that are
started with the returned environment. The product has no switch for them."""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path, module: str) -> dict[str, str]:
    """Register a module's register() as a plugin, and return the environment of servers that load
    it and all earlier ones. It may be called twice."""
    return install_as(folder, module.rpartition(".")[2], f"{module}:register")


def install_as(
    folder: Path, name: str, source: str, group: str = "sglang.srt.plugins"
) -> dict[str, str]:
    """Register a source, `module:attribute`, by name in a group of entry points. Sources in the
    same folder share one environment."""
    info = folder.absolute() / f"{name}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {source}\n", encoding="utf-8")
    root = Path(__file__).parents[3]
    path = [str(info.parent), str(root), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
