"""SGLang plugins that only tests have: each in a folder of its own, known to the servers that are
started with its environment. The product has no switch for what they do."""

from __future__ import annotations

import os
from pathlib import Path


def install(folder: Path, module: str) -> dict[str, str]:
    """Make a module's register() known as a plugin; the environment of the servers that load it,
    beside those that this process's environment has already."""
    name = module.rpartition(".")[2]
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    entry = f"[sglang.srt.plugins]\n{name} = {module}:register\n"
    (info / "entry_points.txt").write_text(entry)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(folder), str(root), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path}
