"""What is built is what is meant to be, and works where there is no checkout."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import PACKAGES, ROOT, Installed, build, somebodys_folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"), built[1], requirements=True)


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    files = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    core = {str(path) for path in files if path.parts[0] == "sage_sched"}
    parts = {f"sage_sched/parts/{path}" for path in files if path.parts[0] != "sage_sched"}
    assert "sage_sched/parts/predictor_store/general_length.json" in parts
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == core | parts
        told = b"".join(wheel.read(name) for name in wheel.namelist())
    for place in (str(ROOT), str(Path.home()), str(built[1].parent)):
        assert place == "/" or f"{place}/".encode() not in told, f"a path of this machine: {place}"


def test_the_source_distribution_has_no_build_in_it(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert "setup.py" in names
    assert "predictor_store/general_length.json" in names
    assert not [name for name in names if name.startswith((".venv", "build", "dist", "results"))]


def test_the_command_says_what_it_does_in_an_empty_environment(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    empty = Installed(tmp_path / "environment", built[1], requirements=False)
    shown = empty.run("sage-sched", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "bench paper" in shown.stdout
    # A folder that somebody works in is not hidden by one of ours, nor taken for it.
    theirs = somebodys_folder(tmp_path / "work")
    mine = empty.run("python", "-m", "bench.mine", cwd=theirs)
    assert mine.stdout == "mine\n", mine.stderr
    missing = empty.run("python", "-c", "import patches", cwd=tmp_path)
    assert "No module named 'patches'" in missing.stderr


def test_the_commands_find_their_own_parts(installed: Installed, tmp_path: Path) -> None:
    theirs = somebodys_folder(tmp_path / "work")
    shown = installed.run("sage-sched", "bench", "--help", cwd=theirs, PYTHONPATH=str(theirs))
    assert "--policies" in shown.stdout, shown.stderr


def test_sglang_knows_the_policies_beside_somebodys_own_packages(
    installed: Installed, tmp_path: Path
) -> None:
    # `python -m` looks for packages where it was started from first.
    theirs = somebodys_folder(tmp_path / "work")
    server = ["-m", "sglang.launch_server", "--model-path", "none", "--schedule-policy", "none"]
    refused = installed.run("python", *server, cwd=theirs)
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if "invalid choice" in line]
    assert "'sage'" in line


def test_a_process_with_somebodys_own_package_says_what_to_do(
    installed: Installed, tmp_path: Path
) -> None:
    theirs = somebodys_folder(tmp_path / "work")
    (theirs / "patches" / "__init__.py").write_text("")
    code = "import patches; from sage_sched.entry_points import register; register()"
    refused = installed.run("python", "-c", code, cwd=theirs)
    last = refused.stderr.strip().splitlines()[-1]
    assert f"another package 'patches', from {theirs / 'patches'}" in last
    assert "sage-sched serve" in last
