"""The doctor names each deliberate fault, and no other."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_MODEL
from patches.ops import checks, doctor
from patches.ops.doctor import Finding
from patches.ops.fit import targets
from patches.scheduler.hooks import scheduler_hooks
from predictor_store.data.warm import Observation, warm_store
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import ProbeConfig, SageConfig, StoreConfig
from tests.nursery import Nursery

pytestmark = pytest.mark.slow

CODE = """
import os, sys
os.chdir({folder!r})
sys.path[:] = filter(None, sys.path)  # as a command's, not as that of `python -c`
from sage_sched.cli import main
sys.exit(main(["doctor", "--json", *{flags!r}]))
"""


@pytest.fixture
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a healthy server's settings, model and store."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", **CPU_MODEL)
    warm_store(tmp_path / "store", [Observation("Why?", 9)] * 3, StoreConfig())
    (tmp_path / "sage.toml").write_text(f'store.path = "{tmp_path}/store"')
    return tmp_path


ON_CPU = ["--device", "cpu"]


@pytest.mark.parametrize(
    ("flags", "fault"), [([], ""), (["--enable-pdmux"], "--enable-pdmux"), (["--tp", "x"], "--tp")]
)
def test_sglang_itself_is_asked_about_flags(
    flags: list[str], fault: str, patient: Path, nursery: Nursery
) -> None:
    named = ["--model-path", f"{patient}/model", "--sage-config", f"{patient}/sage.toml", *ON_CPU]
    done = nursery.run(CODE.format(folder=str(patient), flags=[*named, *flags]))
    faults = [found for found in json.loads(done.stdout) if found["level"] == "FAULT"]
    assert done.returncode == bool(fault), done.stdout + done.stderr
    assert [(found["about"], fault in found["said"], bool(found["do"])) for found in faults] == [
        ("flags", True, True)
    ] * bool(fault)


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


def broken(*about: object) -> None:
    raise FileNotFoundError("token vectors")


def chunk(num_tokens: int, ms: int, most: int) -> tuple[str, str]:
    said = (
        f"a chunk of {num_tokens} tokens takes {ms} ms, of which 41 ms do not depend on its size; "
        f"while answers run, a chunk has at most {most} tokens (decode.max_gap_ms)"
    )
    return "note", said


HEALTHY = {
    "settings": ("ok", f"sage-sched {version('sage-sched')}, "),
    "release": ("ok", f"SGLang {version('sglang')}"),
    "plugin": ("ok", "registered"),
    "store": ("ok", "3 records in "),
    "sockets": ("ok", "in "),
    "predictor": ("ok", "encoder 'static' works"),
    "GPU": ("ok", "2, the first: a GPU"),
    "host memory": ("ok", "100.0 GiB free; KV of preempted requests may take 25.0 GiB"),
    "chunks": chunk(8192, 1466, 5276),
    "slots": ("note", "a server that runs"),
    "flags": ("ok", "with settings"),
}


def answers(bind: bool) -> methodcaller:
    info = {"max_running_requests": 4, "internal_states": [{"sage": {"slots_bind": bind}}]}
    known = {("http://h:9/server_info", "k"): info}
    return methodcaller("setattr", checks, "ask", lambda *asked, timeout_s: known[asked])


MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
ENCODER = "predictor_store.predict.static_encoder.StaticEncoder"
# A change to a healthy server (a function, or settings), its flags, and the findings.
CHANGES: list[tuple[Any, list[str], dict[str, tuple[str, str]]]] = [
    ("", [], {}),
    (damage, [], {"store": ("FAULT", "is damaged")}),
    (use, [], {"store": ("FAULT", "is in use by process")}),
    (link_lock, [], {"store": ("FAULT", "what to do: remove")}),
    (replace, [], {"store": ("FAULT", "another embedder")}),
    (methodcaller("setattr", "sglang.version.__version__", "0.4.0"), [],
     {"release": ("FAULT", "SGLang 0.4.0 is installed")}),
    (methodcaller("setattr", "patches.ops.checks.version", None), [],
     {"release": ("FAULT", "cannot be checked: TypeError")}),
    (methodcaller("setattr", "shutil.disk_usage", lambda path: SimpleNamespace(free=1.5e8)), [],
     {"store": ("FAULT", "150 MB are free on its disk")}),
    (methodcaller("setattr", "tempfile.tempdir", "/tmp/" + "x" * 90), [],
     {"sockets": ("ok", "in /tmp")}),
    (methodcaller("setattr", "tempfile.tempdir", "/tmp/" + "x" * 91), [],
     {"sockets": ("FAULT", "too long for SGLang's sockets, of 107 bytes at most")}),
    (methodcaller("setattr", checks, "socket_folder", lambda: "/none"), [],
     {"sockets": ("FAULT", "/none is no folder that this user may write to")}),
    (methodcaller("setenv", "SGLANG_PLUGINS", "other, sage_sched"), [], {}),
    (methodcaller("setenv", "SGLANG_PLATFORM", "sage_cpu"), [],
     {"GPU": ("note", "the flags ask for the CPU; torch sees 2 accelerators")}),
    (methodcaller("delattr", f"{MANAGER}._handle_batch_output"), [],
     {"hooks": ("FAULT", "TokenizerManager._handle_batch_output")}),
    (methodcaller("setattr", f"{ENCODER}.__init__", broken), [],
     {"predictor": ("FAULT", "'static' cannot be loaded")}),
    *((methodcaller("setenv", name, "other"), [], {"plugin": ("FAULT", f"{name} is 'other'")})
      for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM")),
    (methodcaller("setattr", "torch.accelerator.is_available", lambda: False), [],
     {"GPU": ("FAULT", "torch sees none")}),
    ('store.path = "{folder}/sage.toml/store"', [], {"store": ("FAULT", "may write to")}),
    ("store.on_disk = false", [], {"store": ("ok", ", which stays as it is")}),
    ('store.path = "{folder}/sage.toml/store"\nstore.on_disk = false', [],
     {"store": ("ok", "0 records in ")}),
    ("predictor.deadline_ms = 0.0", [],
     {"settings": ("FAULT", "predictor.deadline_ms"), "store": ("ok", "0 records in "),
      "flags": ("ok", "without settings")}),
    ('predictor.service = "{folder}/no.socket"', [],
     {"store": ("note", "the predictor service has it"),
      "predictor": ("FAULT", "no predictor service at")}),
    ("preemption.host_pool_gib = 8", [], {"host memory": ("ok", "may take 8 GiB a rank")}),
    ("preemption.host_pool_gib = 100.5", [],
     {"host memory": ("FAULT", "host_pool_gib is 100.5 for each rank, but 100.0 GiB are free")}),
    ("", ["--tp", "2"], {}),
    # The flag counts before the variable.
    (methodcaller("setenv", "SAGE_CONFIG", "none.toml"), ["--sage-config", "sage.toml"], {}),
    ("", ["--tp-size", "3"], {"GPU": ("FAULT", "--tp-size is 3, but torch sees 2")}),
    ("", ON_CPU, {"GPU": ("note", "the flags ask for the CPU; torch sees 2 accelerators")}),
    *((answers(bind), ["--host=h", "--port=9", "--api-key=k"], {"slots": said}) for bind, said in (
        (False, ("ok", "no request")), (True, ("note", "raise --max-running-requests, now 4")))),
    ("decode.max_gap_ms = inf", [], {"chunks": chunk(8192, 1466, 8192)}),
    ("decode.max_gap_ms = 400", [], {"chunks": chunk(8192, 1466, 1828)}),
    *(("", [f"--chunked-prefill-size={given}"], {"chunks": said}) for given, said in (
        ("100", chunk(100, 58, 100)), ("-1", ("note", "prompts are not chunked")),
        *((size, ("note", "see flags")) for size in ("many", "9" * 30, "9" * 5000)))),
]  # fmt: skip


def test_hooks_for_hidden_states_are_checked_although_few_servers_have_them() -> None:
    probe = ProbeConfig(record="states")
    every, usual = (
        {hook.target for hook in scheduler_hooks(config)}
        for config in (SageConfig(probe=probe), SageConfig())
    )
    assert usual < every <= {*targets()}


@pytest.mark.parametrize(("change", "flags", "said"), CHANGES)
def test_each_check_says_what_it_has_found(
    change: Any, flags: list[str], said: dict[str, tuple[str, str]], patient: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It does not ask SGLang about flags, because SGLang would keep our plugin."""
    # First: SGLang's modules look for accelerators when they are imported.
    expected = {**HEALTHY, "hooks": ("ok", f"{len(targets())}, and all fit"), **said}
    told = {True: "with settings", False: "without settings"}
    monkeypatch.setattr(checks, "flags", lambda argv, with_settings: told[with_settings])
    monkeypatch.setattr(checks, "free_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "a GPU")
    monkeypatch.setenv("SAGE_CONFIG", f"{patient}/sage.toml")
    if callable(change):
        change(monkeypatch if isinstance(change, methodcaller) else patient / "store")
    else:
        own = "" if "store.path" in change else f'store.path = "{patient}/store"\n'
        (patient / "sage.toml").write_text(own + change.format(folder=patient))
    found = [*doctor.findings(flags)]
    assert {each.about: each.level for each in found} == {k: v for k, (v, _) in expected.items()}
    assert [each for each in found if expected[each.about][1] not in str(each)] == []
    assert all(bool(each.do) == (each.level == "FAULT") for each in found)


def test_sglang_that_is_not_installed_is_a_fault() -> None:
    code = "import sys; sys.modules['sglang'] = None; from sage_sched.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True)
    assert "FAULT release: SGLang is not installed" in found.stdout, found.stderr


def test_findings_are_printed_for_users_and_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    fault, note = Finding("FAULT", "store", "none", "name one"), Finding("note", "GPU", "none")

    def findings(argv: list[str]) -> Iterator[Finding]:
        asked.append(argv)
        yield from found

    monkeypatch.setattr(doctor, "findings", findings)
    # A server has flags with the same beginning.
    flags = ["--model-path", "m", "--json-model-override-args", "{}", "--max-total-tokens=-1"]
    for found, code in (([fault, note], 1), ([note], 0)):
        assert doctor.run([*flags[:2], "--json", *flags[2:]]) == code
        assert json.loads(capsys.readouterr().out) == [asdict(each) for each in found]
    found = [note, fault]
    assert doctor.run(flags) == 1
    assert capsys.readouterr().out == (
        "note  GPU: none\nFAULT store: none\n      what to do: name one\n\n1 fault\n"
    )
    assert asked == [flags] * 3
