"""SGLang plugins for tests alone: made known to a server through its environment."""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path, module: str) -> dict[str, str]:
    """The environment of servers that are to call `module`.register() in each of their processes.

    folder: its own; what Python needs to find the plugin is written there. The product has no
    switch for it.
    """
    name = module.rpartition(".")[2]
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry = f"[sglang.srt.plugins]\n{name} = {module}:register\n"
    (info / "entry_points.txt").write_text(entry)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}
