"""Tests whether another SGLang release fits: `python -m tests.checks.canary`.

It takes the newest release of the package index, or a named one, next to the installed one, and
lists the hooks that do not fit it, supported or not. Nothing is installed: the release is unpacked
in a folder, which comes first on the path of one process. Exit status 1 if something does not fit,
2 if there is no such release.

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


class NoReleaseError(RuntimeError):
    """The package index lacks the release, or cannot be reached. The message is pip's."""


def unpacked(release: str | None, folder: Path) -> Path:
    """Return the folder of a release below `folder`, fetched if it is absent. None: the newest.
    Raises NoReleaseError."""
    if release is not None and (folder / release / "sglang").is_dir():
        return folder / release
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
            raise NoReleaseError(f"no {wanted}: {done.stderr.strip()}")
        place = folder / wheels[0].name.split("-")[1]
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(place)
    return place


def try_release(place: Path) -> tuple[bool, str]:
    """Return whether the release in this folder fits, and the output of patches.ops.fit."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(place.absolute()), _PATH])}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "patches.ops.fit"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode == 0, done.stdout or done.stderr


_PATH = os.pathsep.join(filter(None, [parts_folder(), os.environ.get("PYTHONPATH", "")]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.checks.canary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--release", help="for instance 0.5.22 (default: the newest on the index)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where releases are unpacked")
    args = parser.parse_args(argv)
    try:
        place = unpacked(args.release, args.folder)
    except NoReleaseError as error:
        print(f"tests.checks.canary: {error}", file=sys.stderr)
        return 2
    fits, told = try_release(place)
    print(told.rstrip())
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
