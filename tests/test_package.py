"""The wheel and the source distribution are complete, and work without a checkout."""

from __future__ import annotations

import json
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from sage_sched.cli import COMMANDS
from tests.installed import PACKAGES, ROOT, Installed, build, somebodys_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"), built[1], requirements=True)


def test_the_wheel_holds_the_packages_files_only(built: tuple[Path, Path]) -> None:
    files = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    core = {str(path) for path in files if path.parts[0] == "sage_sched"}
    parts = {f"sage_sched/parts/{path}" for path in files if path.parts[0] != "sage_sched"}
    assert "sage_sched/parts/predictor_store/predict/general_length.json" in parts
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
    assert "predictor_store/predict/general_length.json" in names
    assert not [name for name in names if name.startswith((".venv", "build", "dist", "results"))]


def test_the_command_runs_without_packages(built: tuple[Path, Path], tmp_path: Path) -> None:
    empty = Installed(tmp_path / "environment", built[1], requirements=False)
    shown = empty.run("sage-sched", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "bench run" in shown.stdout
    # A user's working folder is neither hidden by one of ours nor taken for it.
    theirs = somebodys_folder(tmp_path / "work")
    mine = empty.run("python", "-m", "bench.mine", cwd=theirs)
    assert mine.stdout == "mine\n", mine.stderr
    missing = empty.run("python", "-c", "import patches", cwd=tmp_path)
    assert "No module named 'patches'" in missing.stderr


# For each extra in docs/index.md, the packages installed next to it without its requirements. A
# host without a GPU has another build of faiss, with the same modules.
DOCUMENTED = {"gpu": ("faiss-cpu",), "cpu": ("sglang",)}
# Each is run, in one process, as imports are most of it, and has to end well; but for the doctor,
# who finds no GPU. {work}: a folder with the files below.
RUN = (
    "doctor",
    *(f"{command} --help" for command in COMMANDS),
    "warm {work}/prompts.jsonl --store {work}/store",
    "store info --store {work}/store",
    "urgency train {work}/labels.jsonl --out {work}/urgency.safetensors",
    "explain --summary {work}/trace.jsonl",
    "whatif {work}/log.csv --preset h800-qwen3-32b --seeds 1 --output {work}/whatif",
    "bench run gaps --seeds 1 --arms fcfs sage --output {work}/bench",
    "serve --help",  # replaces this process
)
_RUNNER = """
import json, sys
from sage_sched.cli import main
for line in json.load(sys.stdin):
    sys.stdout.flush()
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    assert not status or line == "doctor", f"{line}: {status}"
"""


def test_the_extras_are_those_that_are_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "index.md").read_text()
    assert set(re.findall(r"\[([a-z]+)\]\"", page)) == set(DOCUMENTED)
    more = re.findall(r"sage-sched\[([a-z]+)\]`", page)
    # The others are what developers need.
    assert set(project["optional-dependencies"]) == {*DOCUMENTED, *more, "docs", "test"}
    assert len(more) == 2


def test_documented_installs_are_complete(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Each install has enough if their common part is enough."""
    environment = Installed(tmp_path / "environment", built[1], requirements=False)
    installs = [environment.closure(extra, *names) for extra, names in DOCUMENTED.items()]
    environment.add(installs[0][name] for name in set.intersection(*map(set, installs)))
    assert environment.run("python", "-c", "import pytest", cwd=tmp_path).returncode == 1
    rows = [f"{i},50,{20 + i % 7 * 40},What is {i % 9}?" for i in range(40)]
    header = "arrival_s,input_tokens,output_tokens,prompt"
    (tmp_path / "log.csv").write_text("\n".join([header, *rows]))
    prompts = [{"prompt": f"What is {i}?", "output_tokens": 9 + i} for i in range(300)]
    labels = [{"prompt": f"Help {i}!", "urgency": 1 + i % 5} for i in range(300)]
    events = [{"t": 0.0, "is": "policy", "name": "sage", "at": 1.0}]
    for name, written in (("prompts", prompts), ("labels", labels), ("trace", events)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, written)))
    lines = json.dumps([line.format(work=tmp_path) for line in RUN])
    done = environment.run("python", "-c", _RUNNER, cwd=tmp_path, stdin=lines)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "it/s" not in done.stderr
    assert (tmp_path / "whatif" / "summary.json").exists()
    # The picture takes an extra, and says so.
    assert not (tmp_path / "whatif" / "whatif.svg").exists()
    assert 'pip install "sage-sched[plots]"' in done.stderr
    assert "--sage-config" in done.stdout
    assert "cannot be looked at" not in done.stdout
    assert "ok    hooks" in done.stdout


def test_what_an_install_lacks_is_named(built: tuple[Path, Path], tmp_path: Path) -> None:
    bare = Installed(tmp_path / "environment", built[1], requirements=False)
    bare.add(bare.closure("").values())
    for command, missing in (("bench fit", "aiohttp"), ("predictor serve", "faiss")):
        refused = bare.run("sage-sched", *command.split(), "--help", cwd=tmp_path)
        assert refused.returncode == 1
        assert f"sage-sched: the package {missing!r} is not installed; " in refused.stderr


def test_the_commands_find_their_own_parts(installed: Installed, tmp_path: Path) -> None:
    theirs = somebodys_folder(tmp_path / "work")
    shown = installed.run("sage-sched", "bench", "--help", cwd=theirs, PYTHONPATH=str(theirs))
    assert "--policies" in shown.stdout, shown.stderr


def test_other_packages_do_not_hide_policies(installed: Installed, tmp_path: Path) -> None:
    # `python -m` looks for packages where it was started from first.
    theirs = somebodys_folder(tmp_path / "work")
    server = ["-m", "sglang.launch_server", "--model-path", "none", "--schedule-policy", "none"]
    refused = installed.run("python", *server, cwd=theirs)
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if "invalid choice" in line]
    assert "'sage'" in line


def test_a_name_clash_says_what_to_do(installed: Installed, tmp_path: Path) -> None:
    theirs = somebodys_folder(tmp_path / "work")
    (theirs / "patches" / "__init__.py").write_text("")
    code = "import patches; from sage_sched.entry_points import register; register()"
    refused = installed.run("python", "-c", code, cwd=theirs)
    last = refused.stderr.strip().splitlines()[-1]
    assert f"another package 'patches', from {theirs / 'patches'}" in last
    assert "sage-sched serve" in last
