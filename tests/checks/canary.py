"""Tests whether another SGLang release fits: `python -m tests.checks.canary`.

It takes the newest release of the package index, or a named one, next to the installed one, and
lists the hooks that do not fit it, supported or not. Nothing is installed: the release is unpacked
in results/releases, and comes first on the path of one process. Exit status 1 if something does not
fit, 2 if there is no such release.

A fitting hook may still behave differently; `make test-release RELEASE=...` runs the tests on the
unpacked release.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sage_sched.app.parts_finder import parts_folder

FOLDER = Path("results/releases")


def unpacked(release: str | None) -> Path:
    """Return the folder of a release, fetched if it is absent. None: the newest. Raises
    FileNotFoundError, with pip's message."""
    if release is not None and (FOLDER / release / "sglang").is_dir():
        return FOLDER / release
    wanted = "sglang" if release is None else f"sglang=={release}"
    with tempfile.TemporaryDirectory() as fetched:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*pip, "--only-binary=:all:", "--dest", fetched, wanted],
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = [*Path(fetched).glob("*.whl")]
        if not wheels:
            raise FileNotFoundError(f"no {wanted}: {done.stderr.strip()}")
        place = FOLDER / wheels[0].name.split("-")[1]
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(place)
    return place


def main() -> int:
    """Print the misfits, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", help="for instance 0.5.22 (default: the newest on the index)")
    try:
        place = unpacked(parser.parse_args().release)
    except FileNotFoundError as error:
        print(f"tests.checks.canary: {error}", file=sys.stderr)
        return 2
    path = (str(place.absolute()), parts_folder(), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-P", "-m", "patches.ops.fit"]
    return int(subprocess.run(command, env=environment, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
