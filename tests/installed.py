"""The wheel, installed in an environment of its own: with all that is installed here, with nothing,
or with what `pip` would install for an extra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PARTS = ("patches", "predictor_store", "bench")
PACKAGES = ("sage_sched", *PARTS)


def build(folder: Path) -> tuple[Path, Path]:
    """Source distribution and wheel, the wheel built from the source distribution."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    _run([sys.executable, "-c", code, str(folder)], cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps"]
    _run([*pip, "wheel", *offline, "--no-build-isolation", "-w", str(folder), str(sdist)])
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


class Installed:
    """An environment with only the wheel. With `requirements` it also has this environment's
    packages. Nothing of the checkout is on its path."""

    def __init__(self, folder: Path, wheel: Path, *, requirements: bool) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        self.bin = folder / "bin"
        self.python = str(self.bin / "python")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)])
        (self.packages,) = folder.glob("lib/python*/site-packages")
        if requirements:
            # Its .pth files are not read, so the checkout's own editable install is not found.
            here = sysconfig.get_path("purelib")
            (self.packages / "requirements.pth").write_text(f"{here}\n", encoding="utf-8")
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.env["HF_HUB_OFFLINE"] = "1"

    def run(
        self, *command: str, cwd: Path, stdin: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of the environment's bin folder."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            input=stdin,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
        )

    def closure(self, extra: str, *without_requirements: str) -> dict[str, Distribution]:
        """Return the wheel's requirements with an extra ("" for none), and theirs, by name.

        Packages that are not installed here are left out, so a host without a GPU can read the
        extra for GPUs. without_requirements: names of packages to install by `--no-deps`.
        """
        (info,) = self.packages.glob("sage_sched-*.dist-info")
        wheel = Distribution.at(info)
        found = {each.name: each for each in _required(_asked(wheel, {extra, ""}))}
        return found | {name: distribution(name) for name in without_requirements}

    def add(self, found: Iterable[Distribution]) -> None:
        """Link these packages of this host, and no others, into the environment."""
        for each in found:
            files = [f for f in each.files or () if f.parts[0] not in ("..", "__pycache__")]
            packages = {file.parts[0] for file in files if file.parts[1:] == ("__init__.py",)}
            for file in files:
                # Several packages may share a namespace folder.
                is_whole = file.parts[0] in packages or file.parts[0].endswith(".dist-info")
                parts = file.parts[:1] if is_whole else file.parts[:2]
                place = self.packages.joinpath(*parts)
                place.parent.mkdir(exist_ok=True)
                if not place.exists():
                    place.symlink_to(Path(str(each.locate_file(""))).joinpath(*parts))


def _required(requirements: Iterable[Requirement]) -> list[Distribution]:
    """Return the distributions of these requirements, and of their own."""
    found: list[Distribution] = []
    asked, seen = [*requirements], set[tuple[str, frozenset[str]]]()
    while asked:
        one = asked.pop()
        if (key := (one.name.lower(), frozenset(one.extras))) in seen:
            continue
        seen.add(key)
        try:
            found.append(distribution(one.name))
        except PackageNotFoundError:
            continue
        asked += _asked(found[-1], {*one.extras, ""})
    return found


def _asked(of: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """Return its requirements on this host, with these extras."""
    return [
        one
        for one in map(Requirement, of.requires or ())
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def somebodys_folder(folder: Path) -> Path:
    """Make a working folder of a user whose own packages have the names of ours."""
    for name in PARTS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("WHOSE = 'mine'\n", encoding="utf-8")
    return folder


def _run(command: list[str], cwd: Path | None = None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
