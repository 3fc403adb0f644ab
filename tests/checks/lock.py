"""Writes the installed versions with hashes to requirements.txt: `make lock`.

It asks the package index, through pip, for the file of each version that pip would take here and on
each supported Python. Nothing is downloaded. This host's index may have builds that the public one
lacks (torch for the CPU, under the same version), so both are asked. A hash stays in the file as
long as its version, so builds of other hosts are kept.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

FILE = Path("requirements.txt")
PYTHONS = ("3.11", "3.12")
# Variables that name indexes other than the public one.
_OF_THIS_HOST = ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
_PIN = re.compile(r"^(\S+==\S+)((?: --hash=sha256:[0-9a-f]{64})*)$")


def read(file: Path) -> dict[str, set[str]]:
    """Return the hashes of files by pin (`name==version`). Raises ValueError at any other line."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        pin = _PIN.match(line)
        if pin is None:
            raise ValueError(f"{file}: not `name==version --hash=sha256:...`: {line}")
        found[pin[1]] = set(re.findall(r"sha256:(\w+)", pin[2]))
    return found


def hashes(pins: list[str], python: str, public: bool) -> dict[str, str]:
    """Return the hash of the file that pip would install, by normalized name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pins.txt"
        file.write_text("\n".join(pins), encoding="utf-8")
        # Trap: pip takes "3.11" for 3.11.0, which is too old for some packages.
        another = ["--python-version", python, "--ignore-requires-python", "--target", folder]
        report = _pip(
            "install", "--dry-run", "--quiet", "--no-deps", "--only-binary=:all:", *another,
            "--report", "-", "-r", str(file), public=public,
        )  # fmt: skip
    found = {}
    for each in json.loads(report)["install"]:
        digests = each["download_info"]["archive_info"]["hashes"]
        found[_normalized(each["metadata"]["name"])] = digests["sha256"]
    return found


def _pip(*command: str, public: bool = False) -> str:
    env = dict(os.environ)
    if public:
        env = {name: value for name, value in env.items() if name not in _OF_THIS_HOST}
        env["PIP_CONFIG_FILE"] = os.devnull
    pip = [sys.executable, "-m", "pip", *command]
    return subprocess.run(pip, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Write the file anew. The lines of `#` stay."""
    # Without pip itself and editable packages.
    listed = _pip("freeze", "--all", "--exclude-editable").splitlines()
    pins = [pin.removesuffix("+cpu") for pin in listed if not pin.startswith("pip==")]
    known, found = read(FILE), defaultdict[str, set[str]](set)
    here = ".".join(map(str, sys.version_info[:2]))
    for python, public in [(here, False), *((python, True) for python in PYTHONS)]:
        for name, digest in hashes(pins, python, public).items():
            found[name].add(digest)
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    for pin in pins:
        digests = found[_normalized(pin.partition("==")[0])] | known.get(pin, set())
        lines.append(" ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
