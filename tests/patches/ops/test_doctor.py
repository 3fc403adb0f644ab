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

# Faults of the process are made first.
CODE = """
import os, sys
os.chdir({cwd!r})
sys.path[:] = filter(None, sys.path)  # as a command's, not as that of `python -c`
{breaks}
from sage_sched.cli import main
sys.exit(main(["doctor", "--json", *{argv!r}]))
"""


class Patient:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.model = folder, folder / "store", folder / "model"
        write_model(self.model, **CPU_MODEL)
        warm_store(self.store, [Observation("Why?", 9)] * 3, StoreConfig())
        self.settings = f'[store]\npath = "{self.store}"\n'

    def argv(self, *flags: str) -> list[str]:
        (self.folder / "sage.toml").write_text(self.settings)
        config = str(self.folder / "sage.toml")
        return ["--model-path", str(self.model), "--sage-config", config, *flags]


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Patient:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Patient(tmp_path)


ON_CPU = ["--device", "cpu"]
# Faults of SGLang, each in a process of its own: what breaks it, flags, variables, and the fault.
OF_SGLANG: list[tuple[str, list[str], dict[str, str], str]] = [
    ("", ON_CPU, {}, ""),
    ("import sglang.version; sglang.version.__version__ = '0.4.0'", ON_CPU, {}, "SGLang 0.4.0"),
    ("from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager\n"
     "del Manager._handle_batch_output", ON_CPU, {}, "TokenizerManager._handle_batch_output"),
    # With it, SGLang knows no policy of ours either: two faults, of which this is the first.
    ("", ON_CPU, {"SGLANG_PLUGINS": "sage_cpu"}, "SGLANG_PLUGINS is 'sage_cpu'"),
    # SGLang stops before it reads its flags.
    ("", ON_CPU, {"SGLANG_PLATFORM": "other"}, "SGLANG_PLATFORM is 'other'"),
    ("import predictor_store.predict.static_encoder as encoder\n"
     "def broken(*_): raise FileNotFoundError('token vectors')\n"
     "encoder.StaticEncoder.__init__ = broken", ON_CPU, {}, "'static' cannot be loaded"),
    ("", [], {}, "torch sees none"),
    ("", [*ON_CPU, "--enable-pdmux"], {}, "--enable-pdmux"),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "flags", "env", "named"), OF_SGLANG)
def test_each_fault_of_a_server_is_named(
    breaks: str, flags: list[str], env: dict[str, str], named: str,
    patient: Patient, nursery: Nursery,
) -> None:  # fmt: skip
    code = CODE.format(cwd=str(patient.folder), breaks=breaks, argv=patient.argv(*flags))
    done = nursery.run(code, **env)
    faults = [found for found in json.loads(done.stdout) if found["level"] == "FAULT"]
    assert all(fault["do"] for fault in faults)
    assert done.returncode == bool(faults) == bool(named), done.stdout + done.stderr
    assert not named or any(named in fault["said"] for fault in faults)
    # SGLang may name the same fault of the flags once more.
    assert len([fault for fault in faults if fault["about"] != "flags"]) <= 1


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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (damage, "is damaged"),
        (use, "is in use by process"),
        (link_lock, "what to do: remove"),
        (replace, "another embedder"),
        ('[store]\npath = "{folder}/sage.toml/store"\n', "may write to"),
        ("[predictor]\ndeadline_ms = 0.0\n", "predictor.deadline_ms"),
        ('[predictor]\nservice = "{folder}/no.socket"\n', "no predictor service at"),
        ("[preemption]\nhost_pool_gib = 1e6\n", "host_pool_gib is 1e+06"),
    ],
)
def test_each_fault_of_its_surroundings_is_named(
    change: Callable[[Path], None] | str,
    named: str,
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang is not asked about flags, as it would keep our plugin."""
    monkeypatch.setattr(checks, "flags", lambda argv, with_settings: None)
    if callable(change):
        change(patient.store)
    else:
        own = "" if change.startswith("[store]") else patient.settings
        patient.settings = own + change.format(folder=patient.folder)
    found = doctor.findings(patient.argv(*ON_CPU))
    (fault,) = (str(finding) for finding in found if finding.level == "FAULT")
    assert named in fault


def test_sglang_that_is_not_installed_is_a_fault() -> None:
    code = "import sys; sys.modules['sglang'] = None; from sage_sched.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True)
    assert "FAULT release: SGLang is not installed" in found.stdout, found.stderr


def test_a_program_gets_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def findings(argv: list[str]) -> Iterator[Finding]:
        asked.append(argv)
        yield Finding("FAULT", "store", "there is none", "name one")

    monkeypatch.setattr(doctor, "findings", findings)
    # A server has flags that begin alike.
    flags = ["--model-path", "m", "--json-model-override-args", "{}", "--max-total-tokens=-1"]
    assert doctor.run([*flags[:2], "--json", *flags[2:]]) == 1
    assert asked == [flags]
    (found,) = json.loads(capsys.readouterr().out)
    assert found == {"level": "FAULT", "about": "store", "said": "there is none", "do": "name one"}


def test_a_chunks_cost_is_named() -> None:
    for max_gap_ms, given, said in (
        (1000.0, None, "a chunk of 8192 tokens takes 1466 ms"),
        (math.inf, None, "at most 8192 tokens"),
        (1000.0, "100", "at most 100 tokens"),
        (400.0, None, "at most 1828 tokens"),
        (1000.0, "-1", "prompts are not chunked"),
        *((1000.0, given, "see flags") for given in ("many", "9" * 30, "9" * 5000)),
    ):
        config = SageConfig.parse({"decode": {"max_gap_ms": max_gap_ms}})
        found = checks.chunks(config, {"chunked_prefill_size": given})
        assert said in found
        assert isinstance(found, checks.Note)
