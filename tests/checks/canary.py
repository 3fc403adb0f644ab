"""Tests whether another SGLang release fits: `python -m tests.checks.canary`.

It takes the newest release of the package index, or a named one, and lists the hooks that do not
fit it. The release is installed in results/releases alone, which comes first on the path of one
process. Exit status 1 if something does not fit, 2 if there is no such release.

A fitting hook may still behave differently: see `make test-release RELEASE=...`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("results/releases")


def installed(release: str | None) -> Path:
    """Return the folder of a release (None: the newest), fetched if it is absent. Raises
    CalledProcessError."""
    place = FOLDER / (release or "newest")
    if release is None or not (place / "sglang").is_dir():
        wanted = "sglang" if release is None else f"sglang=={release}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--only-binary=:all:", "--target", str(place), wanted], check=True)
    return place


def main() -> int:
    """Print the misfits, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", help="for instance 0.5.22 (default: the newest on the index)")
    try:
        place = installed(parser.parse_args().release)
    except subprocess.CalledProcessError:  # pip has said why
        return 2
    path = (str(place.absolute()), str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-P", "-m", "patches.ops.fit"]
    return int(subprocess.run(command, env=environment, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
