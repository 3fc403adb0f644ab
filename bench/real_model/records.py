"""Results with the real model, a JSON line each: bench/records/real_model.jsonl.

A line has `experiment` (what was tried), its figures, and where it comes from: `command`, `commit`,
`model` and `host`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.real_model.fetch import MODEL_NAME

FILE = Path(__file__).parents[1] / "records" / "real_model.jsonl"


def append(rows: Sequence[Mapping[str, Any]], command: str) -> None:
    """Add rows to the file, each with where it comes from."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=FILE.parents[2], capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    about = {
        "command": command,
        "commit": commit,
        "model": MODEL_NAME,
        "host": f"{os.cpu_count()} CPU cores, load {os.getloadavg()[2]:.1f}",
    }
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **about}) + "\n" for row in rows)
