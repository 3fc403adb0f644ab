"""The wheel and the source distribution are complete, and work without a checkout."""

from __future__ import annotations

import ast
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from sage_sched.commands import COMMANDS
from tests.installed import PACKAGES, PARTS, ROOT, Installed, build, somebodys_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("environment"), built[1], requirements=True)


def test_wheel_and_source_hold_the_packages_files_only(built: tuple[Path, Path]) -> None:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    paths = [path for path in found if path.is_file() and "__pycache__" not in path.parts]
    files = [path.relative_to(ROOT) for path in paths]
    with zipfile.ZipFile(built[1]) as wheel:
        told = {name: wheel.read(name) for name in wheel.namelist()}
    assert {name for name in told if ".dist-info/" not in name} == {
        f"{'' if file.parts[0] == 'sage_sched' else 'sage_sched/parts/'}{file}" for file in files
    }
    assert "sage_sched/parts/predictor_store/predict/general_length.json" in told
    for place in (str(ROOT), str(Path.home()), str(built[1].parent)):
        is_told = f"{place}/".encode() in b"".join(told.values())
        assert place == "/" or not is_told, f"a path of this machine: {place}"
    with tarfile.open(built[0]) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert {"setup.py", "predictor_store/predict/general_length.json"} <= {*names}
    assert not [name for name in names if name.startswith((".venv", "build", "dist", "results"))]


def test_the_command_runs_without_packages(built: tuple[Path, Path], tmp_path: Path) -> None:
    empty = Installed(tmp_path / "environment", built[1], requirements=False)
    shown = empty.run("sage-sched", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    missing = empty.run("sage-sched", "doctor", cwd=tmp_path)
    assert missing.returncode == 1
    assert "is not installed; docs/index.md says" in missing.stderr
    assert "Traceback" not in missing.stderr


# For each extra in docs/index.md, the packages that are installed by `--no-deps`.
DOCUMENTED: dict[str, tuple[str, ...]] = {"gpu": (), "cpu": ("sglang",)}
# All run in one process, because imports take most of the time. Each must succeed, except the
# doctor, which finds no GPU. {work}: a folder with the files below.
RUN = (
    "doctor",
    *(f"{command} --help" for command in COMMANDS),
    "warm {work}/prompts.jsonl --store {work}/store",
    "store info --store {work}/store",
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
    events = [{"t": 0.0, "is": "policy", "name": "sage", "at": 1.0}]
    for name, written in (("prompts", prompts), ("trace", events)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, written)))
    lines = json.dumps([line.format(work=tmp_path) for line in RUN])
    done = environment.run("python", "-c", _RUNNER, cwd=tmp_path, stdin=lines)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # The picture needs an extra, and says so.
    assert (tmp_path / "whatif" / "summary.json").exists()
    assert not (tmp_path / "whatif" / "whatif.svg").exists()
    assert 'pip install "sage-sched[plots]"' in done.stderr
    assert "--sage-config" in done.stdout
    assert "cannot be checked" not in done.stdout
    assert "ok    hooks" in done.stdout


# A program that embeds SGLang, and has packages of the names of ours. It imports them before SGLang
# loads its plugins, or after that.
_PROGRAM = """
import json, sys
from importlib import import_module
imported = lambda: [import_module(name).WHOSE for name in {parts}]
before = imported() if {is_first} else []
from sage_sched.entry_points import activate
activate()  # as SGLang does, but a host without a GPU needs it before the next line
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
(policies,) = [each for each in parser._actions if "--schedule-policy" in each.option_strings]
ours = [name for name in sys.modules if name.partition(".")[0] in {parts}]
print(json.dumps([before, imported(), "sage" in policies.choices, [*filter(None, ours)]]))
"""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_user_has_packages_of_the_same_names(
    is_first: bool, installed: Installed, tmp_path: Path
) -> None:
    theirs = somebodys_folder(tmp_path / "work")
    code = _PROGRAM.format(parts=PARTS, is_first=is_first)
    done = installed.run("python", "-c", code, cwd=theirs)
    assert done.returncode == 0, done.stderr
    before, after, knows_sage, imported = json.loads(done.stdout.splitlines()[-1])
    mine = ["mine"] * len(PARTS)
    assert (before, after, knows_sage) == (mine if is_first else [], mine, True)
    assert imported == ([*PARTS] if is_first else [])
    shown = installed.run("sage-sched", "top", "--help", cwd=theirs, PYTHONPATH=str(theirs))
    assert "--serve" in shown.stdout, shown.stderr
    # `python -m` looks for packages where it was started from first.
    server = ["-m", "sglang.launch_server", "--model-path", "none", "--schedule-policy", "none"]
    refused = installed.run("python", *server, cwd=theirs)
    (line,) = [line for line in refused.stderr.splitlines() if "invalid choice" in line]
    assert (refused.returncode, "'sage'" in line) == (2, True)


def test_a_wheel_has_no_module_of_ours_under_its_old_name(built: tuple[Path, Path]) -> None:
    """Docstrings may name them. Code may not."""
    with zipfile.ZipFile(built[1]) as wheel:
        for name in wheel.namelist():
            if not name.endswith(".py"):
                continue
            for node in ast.walk(ast.parse(wheel.read(name))):
                match node:
                    case ast.Import():
                        said = [alias.name for alias in node.names]
                    case ast.ImportFrom(module=str(module), level=0):
                        said = [module]
                    case ast.Constant(value=str(text)):
                        said = [text] if "." in text else []
                    case _:
                        said = []
                assert not [*filter(_OLD_NAME.match, said)], f"{name}: {said}"


_OLD_NAME = re.compile(rf"({'|'.join(PARTS)})(\.[a-z_]+)*(:\w+)?$")
