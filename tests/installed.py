"""The wheel, installed in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("sage_sched", "patches", "predictor_store", "bench")
# Somebody's own packages, by the names of ours. Whoever takes them for ours fails.
_THEIRS = "raise RuntimeError('not ours')\n"


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
    """An environment with the wheel and nothing else; with `requirements`, as if those of this
    environment were installed there too. Nothing of the checkout is on its path."""

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

    def run(self, *command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment's bin folder."""
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
        )


def somebodys_folder(folder: Path) -> Path:
    """A folder to work in that has packages of the names of ours, and a plain folder `bench`."""
    for name in ("patches", "predictor_store"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(_THEIRS, encoding="utf-8")
    (folder / "bench").mkdir()
    (folder / "bench" / "mine.py").write_text("print('mine')\n", encoding="utf-8")
    return folder


def _run(command: list[str], cwd: Path | None = None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
