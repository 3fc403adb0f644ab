"""Checks that tests notice bugs that we have had: `python -m tests.checks.bugs`.

Each bug of bugs.toml goes into a copy of the checkout, and its tests run there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).parents[2]
# pytest's exit code if tests ran and some failed.
_FAILED = 1
_IGNORED = shutil.ignore_patterns(".*", "results", "dist", "build", "__pycache__")
# Some bugs make a test hang, which counts as noticed. The thread method then ends pytest.
_OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long",
    "-otimeout=300", "-otimeout_method=thread",
)  # fmt: skip


class Bug(NamedTuple):
    """A bug: the text `right` of `file`, which occurs once, becomes `wrong`."""

    file: str
    tests: str
    right: str
    wrong: str


BUGS = {
    name: Bug(*bug)
    for name, bug in tomllib.loads(Path(__file__).with_name("bugs.toml").read_text()).items()
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only bugs in whose names one of these occurs")
    words = parser.parse_args().words or [""]
    chosen = [name for name in BUGS if any(word in name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, ignore=_IGNORED)
        sound = _run(checkout, *sorted({BUGS[name].tests for name in chosen}))
        if sound.returncode != 0:
            print(f"tests fail without a bug:\n{sound.stdout[-3000:]}")
            return 2
        num_noticed = 0
        for name in tqdm(chosen, unit="bug"):
            is_noticed = _notices(checkout, BUGS[name])
            num_noticed += is_noticed
            tqdm.write(f"{'noticed' if is_noticed else 'NOT NOTICED'}: {name}")
    print(f"{num_noticed} of {len(chosen)} bugs noticed")
    return int(num_noticed < len(chosen))


def _notices(checkout: Path, bug: Bug) -> bool:
    """Whether a test fails with the bug, which is removed again."""
    path = checkout / bug.file
    sound = path.read_text()
    path.write_text(sound.replace(bug.right, bug.wrong))
    done = _run(checkout, bug.tests)
    path.write_text(sound)
    return done.returncode == _FAILED


def _run(checkout: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *tests]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
