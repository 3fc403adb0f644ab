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


def another_release(patient: Patient) -> None:
    patient.breaks = "import sglang.version; sglang.version.__version__ = '0.4.0'"


def a_renamed_hook(patient: Patient) -> None:
    patient.breaks = (
        "from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager\n"
        "del Manager._handle_batch_output"
    )


def a_changed_hook(patient: Patient) -> None:
    patient.breaks = (
        "from sglang.srt.managers.schedule_policy import SchedulePolicy as Policy\n"
        "Policy._validate_and_adjust_policy = lambda self, requests: None"
    )


def a_plugin_list(patient: Patient) -> None:
    # With it, SGLang knows no policy of ours either: two faults, of which this is the first.
    patient.env["SGLANG_PLUGINS"] = "sage_cpu"
    patient.flags = ["--schedule-policy", "fcfs"]
    patient.settings = ""
    patient.device += ["--disable-radix-cache"]


def another_platform(patient: Patient) -> None:
    # SGLang stops before it reads its flags.
    patient.env["SGLANG_PLATFORM"] = "somebodys"


def a_damaged_store(patient: Patient) -> None:
    file = file_of(patient.store)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    file.write_bytes(content)


def a_store_in_use(patient: Patient) -> None:
    fd = os.open(patient.store / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)  # until this process ends


def a_link_in_the_locks_place(patient: Patient) -> None:
    (patient.store / "lock").unlink(missing_ok=True)
    (patient.store / "lock").symlink_to("/etc/passwd")


def anothers_store(patient: Patient) -> None:
    shutil.rmtree(patient.store)
    Store(StoreConfig(path=str(patient.store)), "another embedder", 768).close()


def no_place_for_a_store(patient: Patient) -> None:
    (patient.folder / "file").write_text("")
    patient.settings = f'[store]\npath = "{patient.folder}/file/store"\n'


def a_wrong_setting(patient: Patient) -> None:
    patient.settings += "[predictor]\ndeadline_ms = 0.0\n"


def no_service(patient: Patient) -> None:
    patient.settings += f'[predictor]\nservice = "{patient.folder}/no.socket"\n'


def a_damaged_encoder(patient: Patient) -> None:
    patient.breaks = (
        "import predictor_store.predict.static_encoder as encoder\n"
        "def broken(*_): raise FileNotFoundError('token vectors')\n"
        "encoder.StaticEncoder.__init__ = broken"
    )


def too_little_host_memory(patient: Patient) -> None:
    patient.settings += "[preemption]\nhost_pool_gib = 1e6\n"


def no_gpu(patient: Patient) -> None:
    patient.device = []


def a_refused_flag(patient: Patient) -> None:
    patient.flags = ["--enable-pdmux"]


def a_wrong_number_of_gpus(patient: Patient) -> None:
    patient.flags = ["--tensor-par", "two"]


def an_unknown_policy(patient: Patient) -> None:
    patient.flags = ["--schedule-policy", "shortest-job-first"]


Broken = tuple[Callable[[Patient], None], str]
# Of what SGLang is, or does, each in a process of its own.
OF_SGLANG: list[Broken] = [
    (another_release, "SGLang 0.4.0 is installed, supported: 0.5.22, 0.5.23"),
    (a_renamed_hook, "TokenizerManager._handle_batch_output"),
    (a_changed_hook, "has no parameter policy, tree_cache"),
    (a_plugin_list, "SGLANG_PLUGINS is 'sage_cpu'"),
    (another_platform, "SGLANG_PLATFORM is 'somebodys'"),
    (a_damaged_encoder, "'static' cannot be loaded: FileNotFoundError('token vectors')"),
    (no_gpu, "torch sees none"),
    (a_refused_flag, "--enable-pdmux"),
    (a_wrong_number_of_gpus, "invalid int value: 'two'"),
    (an_unknown_policy, "invalid choice: 'shortest-job-first'"),
]
# The others; here SGLang is not asked about flags, as it would keep our plugin.
OF_OTHERS: list[Broken] = [
    (a_damaged_store, "is damaged"),
    (a_store_in_use, "is in use by process"),
    (a_link_in_the_locks_place, "what to do: remove"),
    (anothers_store, "another embedder"),
    (no_place_for_a_store, "may write to"),
    (a_wrong_setting, "predictor.deadline_ms is 0"),
    (no_service, "no predictor service at"),
    (too_little_host_memory, "host_pool_gib is 1e+06, for each rank"),
]


def test_nothing_is_wrong_with_a_healthy_one(patient: Patient) -> None:
    assert patient.faults() == []


@pytest.mark.parametrize(("breaks", "named"), OF_SGLANG, ids=[f.__name__ for f, _ in OF_SGLANG])
def test_each_fault_of_a_server_is_named(
    breaks: Callable[[Patient], None], named: str, patient: Patient
) -> None:
    breaks(patient)
    found = patient.faults()
    assert any(named in fault for fault in found), found
    # What SGLang says of the flags may be the same once more.
    assert len([fault for fault in found if not fault.startswith("FAULT flags")]) <= 1, found


@pytest.mark.parametrize(("breaks", "named"), OF_OTHERS, ids=[f.__name__ for f, _ in OF_OTHERS])
def test_each_fault_of_its_surroundings_is_named(
    breaks: Callable[[Patient], None],
    named: str,
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "flags", lambda argv, with_settings: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    patient.in_process = True
    assert patient.faults() == []
    breaks(patient)
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
