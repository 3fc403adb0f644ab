"""Faults made on purpose, each of which the doctor has to name, and no other with it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_MODEL
from patches.ops import checks, doctor
from patches.ops.doctor import Finding
from predictor_store.data.warm import Observation, warm_store
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import SageConfig, StoreConfig
from tests.nursery import Nursery

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# Faults of the process are made first.
CODE = """
import os, sys
os.chdir({cwd!r})
sys.path[:] = filter(None, sys.path)  # as a command's, not as that of `python -c`
{breaks}
from sage_sched.cli import main
sys.exit(main(["doctor", *{argv!r}]))
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "llama", **CPU_MODEL)


class Patient:
    """A server's surroundings, healthy as they are made."""

    def __init__(self, nursery: Nursery, model: Path, folder: Path) -> None:
        self.nursery, self.folder, self.cwd = nursery, folder, folder / "cwd"
        self.cwd.mkdir()
        self.model = folder / "model"
        shutil.copytree(model, self.model)
        self.store = folder / "store"
        warm_store(self.store, [Observation("Why?", 9)] * 3, StoreConfig())
        self.settings = f'[store]\npath = "{self.store}"\n'
        self.in_process = False
        self.device, self.flags, self.breaks = ["--device", "cpu"], list[str](), ""
        self.env = {"CUDA_VISIBLE_DEVICES": ""}

    def faults(self) -> list[str]:
        """The doctor's faults with their advice; none if its exit status agrees."""
        file = self.folder / "sage.toml"
        file.write_text(self.settings)
        argv = ["--model-path", str(self.model), *self.device, "--sage-config", str(file)]
        argv += self.flags
        if self.in_process:
            lines = [*"\n".join(map(str, doctor.findings(argv))).splitlines(), ""]
            return paired(lines)
        code = CODE.format(cwd=str(self.cwd), breaks=self.breaks, argv=argv)
        done = self.nursery.run(code, **self.env)
        found = paired(done.stdout.splitlines())
        assert done.returncode == (1 if found else 0), done.stdout + done.stderr
        return found


def paired(lines: list[str]) -> list[str]:
    """The faults among printed findings, each of which says what to do."""
    found = [
        f"{line} {following.strip()}"
        for line, following in pairwise(lines)
        if line.startswith("FAULT")
    ]
    assert all("what to do:" in fault for fault in found)
    return found


@pytest.fixture
def patient(nursery: Nursery, model: Path, tmp_path: Path) -> Patient:
    return Patient(nursery, model, tmp_path)


Change = dict[str, Any]
# Changes to a patient, each with the fault that the doctor has to name. These are of SGLang, each
# in a process of its own.
OF_SGLANG: dict[str, tuple[Change, str]] = {
    "another release": (
        {"breaks": "import sglang.version; sglang.version.__version__ = '0.4.0'"},
        "SGLang 0.4.0 is installed, supported: 0.5.22, 0.5.23"),
    "a renamed hook": (
        {"breaks": "from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager\n"
                   "del Manager._handle_batch_output"},
        "TokenizerManager._handle_batch_output"),
    "a changed hook": (
        {"breaks": "from sglang.srt.managers.schedule_policy import SchedulePolicy as Policy\n"
                   "Policy._validate_and_adjust_policy = lambda self, requests: None"},
        "has no parameter policy, tree_cache"),
    # With it, SGLang knows no policy of ours either: two faults, of which this is the first.
    "a list of plugins": (
        {"env": {"SGLANG_PLUGINS": "sage_cpu"}, "flags": ["--schedule-policy", "fcfs"],
         "settings": "", "device": ["--device", "cpu", "--disable-radix-cache"]},
        "SGLANG_PLUGINS is 'sage_cpu'"),
    # SGLang stops before it reads its flags.
    "another platform": ({"env": {"SGLANG_PLATFORM": "other"}}, "SGLANG_PLATFORM is 'other'"),
    "a damaged encoder": (
        {"breaks": "import predictor_store.predict.static_encoder as encoder\n"
                   "def broken(*_): raise FileNotFoundError('token vectors')\n"
                   "encoder.StaticEncoder.__init__ = broken"},
        "'static' cannot be loaded: FileNotFoundError('token vectors')"),
    "no GPU": ({"device": []}, "torch sees none"),
    "a refused flag": ({"flags": ["--enable-pdmux"]}, "--enable-pdmux"),
    "a wrong number": ({"flags": ["--tensor-par", "two"]}, "invalid int value: 'two'"),
    "an unknown policy": (
        {"flags": ["--schedule-policy", "shortest-job-first"]},
        "invalid choice: 'shortest-job-first'"),
}  # fmt: skip


def damage(store: Path) -> None:
    content = bytearray(file_of(store).read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    file_of(store).write_bytes(content)


def use(store: Path) -> None:
    fd = os.open(store / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)  # until this process ends


def link_lock(store: Path) -> None:
    (store / "lock").unlink(missing_ok=True)
    (store / "lock").symlink_to("/etc/passwd")


def replace(store: Path) -> None:
    shutil.rmtree(store)
    Store(StoreConfig(path=str(store)), "another embedder", 768).close()


# A change to the store, or a section of the settings. SGLang is not asked about flags, as it would
# keep our plugin.
OF_OTHERS: list[tuple[Callable[[Path], None] | str, str]] = [
    (damage, "is damaged"),
    (use, "is in use by process"),
    (link_lock, "what to do: remove"),
    (replace, "another embedder"),
    ('[store]\npath = "{folder}/sage.toml/store"\n', "may write to"),
    ("[predictor]\ndeadline_ms = 0.0\n", "predictor.deadline_ms is 0"),
    ('[predictor]\nservice = "{folder}/no.socket"\n', "no predictor service at"),
    ("[preemption]\nhost_pool_gib = 1e6\n", "host_pool_gib is 1e+06, for each rank"),
]


def test_nothing_is_wrong_with_a_healthy_one(patient: Patient) -> None:
    assert patient.faults() == []


@pytest.mark.parametrize(("change", "named"), OF_SGLANG.values(), ids=OF_SGLANG)
def test_each_fault_of_a_server_is_named(change: Change, named: str, patient: Patient) -> None:
    vars(patient).update(change)
    patient.env = {"CUDA_VISIBLE_DEVICES": "", **patient.env}
    found = patient.faults()
    assert any(named in fault for fault in found), found
    # SGLang may name the same fault of the flags once more.
    assert len([fault for fault in found if not fault.startswith("FAULT flags")]) <= 1, found


@pytest.mark.parametrize(("change", "named"), OF_OTHERS)
def test_each_fault_of_its_surroundings_is_named(
    change: Callable[[Path], None] | str,
    named: str,
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "flags", lambda argv, with_settings: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    patient.in_process = True
    assert patient.faults() == []
    if callable(change):
        change(patient.store)
    else:
        own = "" if change.startswith("[store]") else patient.settings
        patient.settings = own + change.format(folder=patient.folder)
    (found,) = patient.faults()
    assert named in found


def test_where_sglang_is_not_installed_it_says_so() -> None:
    code = """
import sys
sys.modules["sglang"] = None
from sage_sched.cli import main
sys.exit(main(["doctor"]))
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "FAULT release: SGLang is not installed" in found.stdout, found.stderr
    assert found.returncode == 1


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        doctor.run(["--help"])
    assert "usage: sage-sched doctor" in capsys.readouterr().out


def test_a_program_gets_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def findings(argv: list[str]) -> Iterator[Finding]:
        asked.append(argv)
        yield Finding("ok", "release", "SGLang")
        yield Finding("FAULT", "store", "there is none", "name one")

    monkeypatch.setattr(doctor, "findings", findings)
    # A server has flags that begin alike.
    flags = ["--model-path", "m", "--json-model-override-args", "{}", "--max-total-tokens=-1"]
    assert doctor.run([*flags[:2], "--json", *flags[2:]]) == 1
    assert asked == [flags]
    first, second = json.loads(capsys.readouterr().out)
    assert first == {"level": "ok", "about": "release", "said": "SGLang", "do": ""}
    assert second["do"] == "name one"


def test_other_packages_warnings_are_not_among_what_it_says(patient: Patient) -> None:
    code = CODE.format(cwd=str(patient.cwd), breaks="", argv=["--json"])
    code = f"import warnings\n{code}".replace(
        "from sage_sched.cli import main",
        "from sage_sched.cli import main\nfrom patches.ops import doctor\n"
        "doctor.findings = lambda argv: warnings.warn('AWQ') or iter(())",
    )
    done = patient.nursery.run(code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ({}, None, "a chunk of 8192 tokens takes"),
        ({}, "100", "answers, 100 tokens at most"),
        ({"decode": {"max_gap_ms": math.inf}}, None, "answers, 8192 tokens at most"),
        ({}, "-1", "prompts are not chunked"),
        *(({}, given, "see flags") for given in ("many", "9" * 30, "9" * 5000)),
    ],
)
def test_a_chunks_cost_is_named(settings: dict[str, object], given: str | None, said: str) -> None:
    found = checks.chunks(SageConfig.parse(settings), {"chunked_prefill_size": given})
    assert said in found
    assert isinstance(found, checks.Note)


def test_beside_running_answers_chunks_are_cut_by_the_bound() -> None:
    def beside(max_gap_ms: float) -> int:
        config = SageConfig.parse({"decode": {"max_gap_ms": max_gap_ms}})
        return int(checks.chunks(config, {}).partition("answers, ")[2].split()[0])

    assert 0 < beside(200.0) < beside(400.0) < 8192
