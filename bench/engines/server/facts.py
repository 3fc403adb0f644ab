"""Collects the hardware and versions on which a number depends."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("sage-sched", "sglang", "torch", "transformers", "numpy")


def host_facts() -> dict[str, str]:
    """Return the names of the hardware, versions of the software, and the checkout's commit, with
    "+" if files differ from it; "" if unknown."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpus[0] if cpus else platform.processor(),
        "num_cores": str(os.cpu_count()),
        "gpu": ", ".join(gpus) or "none",
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in _PACKAGES},
        "commit": commit() + ("+" if _git("status", "--porcelain") else ""),
    }


def version_of(package: str) -> str:
    """Return the version of an installed package; "" if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def commit() -> str:
    """Return the commit of the checkout that this file is in; "" if it is in none."""
    return _git("rev-parse", "--short", "HEAD")


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
