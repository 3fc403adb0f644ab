"""The plugin in SGLang processes that have done nothing else, without a model."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from patches.compat import SUPPORTED_RELEASES
from patches.ops import serve_command
from predictor_store.store.store import Store, refuse_in_use
from sage_sched.app.config import StoreConfig
from sage_sched.app.registry import policy_names
from tests.nursery import Nursery

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def launch(nursery: Nursery, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    """python -m sglang.launch_server"""
    module = "import runpy; runpy.run_module('sglang.launch_server', run_name='__main__')"
    return nursery.run(module, "--model-path", "no-such-model", *flags, **env)


def test_installed_but_not_chosen_no_scheduling_code_is_touched(nursery: Nursery) -> None:
    result = nursery.run(
        """
import inspect
import sglang.srt.managers.scheduler as scheduler, sglang.srt.managers.schedule_policy as policy
import sglang.srt.managers.tokenizer_manager as manager
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

before = {
    (cls, name): value
    for cls in (scheduler.Scheduler, policy.SchedulePolicy, policy.PrefillAdder,
                manager.TokenizerManager)
    for name, value in inspect.getmembers(cls, inspect.isfunction)
}
load_plugins()
print(sorted(HookRegistry._patched))
touched = {name for (cls, name), value in before.items() if getattr(cls, name) is not value}
print(sorted(touched))
"""
    )
    assert result.returncode == 0, result.stderr
    patched, touched = result.stdout.splitlines()[-2:]
    assert patched == str(
        [
            "sglang.srt.managers.scheduler.Scheduler.__init__",
            "sglang.srt.server_args.ServerArgs.add_cli_args",
            "sglang.srt.server_args.ServerArgs.check_server_args",
            "sglang.srt.server_args.ServerArgs.from_cli_args",
        ]
    )
    assert touched == "['__init__']"


def test_the_help_of_serve_names_ours(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, command: become.append(command))
    assert serve_command.run(["--port", "30000"]) == 2  # without a model, without a traceback
    serve_command.run(["--model-path", "none", "--help"])
    shown = nursery.run(become[0][become[0].index("-c") + 1])
    assert shown.returncode == 0, shown.stderr
    ours = "".join(shown.stdout.rpartition("\nsage-sched:\n")[2].split())
    for what in ("--sage-configFILE", "--sage-traceFILE", "--sage-shadowFILE"):
        assert what in ours
    assert ",".join(policy_names()) in ours
    assert "srpt-oracle" not in ours


def test_a_store_in_use_is_said_in_one_line(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "sage.toml"
    settings.write_text(f'[store]\npath = "{tmp_path}/store"\n')
    config = StoreConfig(path=f"{tmp_path}/store")
    flags = ["--model-path", "none", "--device", "cpu", "--sage-config", str(settings)]
    with Store(config, "any", 8):
        for more in (["--schedule-policy", "sage"], ["--sage-shadow", str(tmp_path / "record")]):
            refused = nursery.run(
                f"""
from predictor_store.store import store
store.refuse_in_use.__defaults__ = (0.0,)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args({[*flags, *more]})  # which `sage-sched doctor` has looked at, too
args.check_server_args()
"""
            )
            last = refused.stderr.splitlines()[-1]
            assert f"sage-sched: the store {tmp_path}/store is in use by process" in last
            assert "Traceback" not in refused.stderr
    refuse_in_use(config, 0.0)  # the lock is free again


REFUSED = [
    (
        ["--tokenizer-worker-num", "2"],
        {"SGLANG_HTTP_SERVER_APP_PATH": "somebody:app"},
        "SGLANG_HTTP_SERVER_APP_PATH",
    ),
    (["--pp-size", "2"], {}, "--pp-size"),
    (["--use-ray"], {}, "--use-ray"),
    (["--smg-grpc-mode"], {}, "--smg-grpc-mode"),
    (["--grpc-mode"], {}, "--smg-grpc-mode"),
    (["--skip-tokenizer-init"], {}, "--skip-tokenizer-init"),
    (["--enable-pd-role-switch"], {}, "--enable-pd-role-switch"),
    (["--encoder-only"], {}, "--encoder-only"),
    (["--is-embedding"], {}, "--is-embedding"),
    (["--dllm-algorithm", "LowConfidence"], {}, "--dllm-algorithm"),
    (["--enable-pdmux"], {}, "--enable-pdmux"),
    ([], {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
    (["--sage-config", "no-such-file.toml"], {}, "no-such-file.toml"),
]


def test_what_it_cannot_serve_is_refused_by_name(nursery: Nursery) -> None:
    result = nursery.run(
        f"""
import os
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
base = ["--model-path", "none", "--schedule-policy", "sage"]
for flags, env, named in {REFUSED}:
    os.environ.update(env)
    try:
        prepare_server_args(base + flags)
        print("accepted", flags, env)
    except SystemExit as refusal:
        if not str(refusal).startswith("sage-sched: ") or named not in str(refusal):
            print("not named", flags, env, refusal)
    for name in env:
        del os.environ[name]
prepare_server_args(base)
prepare_server_args(base[:2] + ["--tokenizer-worker-num", "2"])
import patches.refusals
patches.refusals.serves_named_app = lambda: False
try:
    prepare_server_args(base + ["--tokenizer-worker-num", "2"])
    print("accepted several HTTP processes without hooks")
except SystemExit as refusal:
    print("done" if "on SGLang 0.5.22" in str(refusal) else f"not named {{refusal}}")
"""
    )
    assert result.stdout.splitlines()[-1:] == ["done"], result.stderr
    assert "accepted" not in result.stdout
    assert "not named" not in result.stdout


def test_the_shadow_is_for_stock_policies_that_it_can_see(nursery: Nursery, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    result = nursery.run(
        f"""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
base = ["--model-path", "none", "--sage-shadow", {str(record)!r}]
for flags in (["--schedule-policy", "sage"], ["--skip-tokenizer-init"], ["--use-ray"],
              ["--tokenizer-worker-num", "2"], ["--disaggregation-mode", "decode"],
              ["--sage-shadow", "/no/such/folder/record"]):
    try:
        prepare_server_args(base + flags)
        print("accepted", flags)
    except SystemExit as refusal:
        print(refusal)
args = prepare_server_args(base + ["--schedule-policy", "lpm", "--enable-priority-scheduling"])
print(args._sage_shadow)
try:
    args.check_server_args()
except TypeError:
    pass  # SGLang's own check looks for the model; ours comes before
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
print([hasattr(one, "__wrapped__") for one in (
    TokenizerManager._send_one_request,
    TokenizerManager._init_req_state, Scheduler.get_new_batch_prefill)])
"""
    )
    *said, kept, hooked = result.stdout.splitlines()[-8:]
    named = (
        "sage predicts", "--skip-tokenizer", "--use-ray", "--tokenizer-worker-num",
        "--disaggregation-mode", "/no/such",
    )  # fmt: skip
    for line, name in zip(said, named, strict=True):
        assert line.startswith("sage-sched: ")
        assert name in line
    assert (kept, hooked) == (str(record), "[False, True, False]"), result.stderr
    assert not record.exists()


def test_the_last_line_names_the_error(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "sage.toml").write_text("")
    result = launch(nursery, "--sage-config", str(tmp_path / "sage.toml"))
    assert result.returncode == 1
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("sage-sched: --sage-config needs --schedule-policy ")
    assert "sage" in last_line.split()[-1].split("|")


def test_an_unsupported_release_is_refused(nursery: Nursery) -> None:
    result = nursery.run(
        """
import sglang.version
sglang.version.__version__ = "0.4.0"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(["--model-path", "none", "--schedule-policy", "sage"])
"""
    )
    assert result.returncode == 1
    assert f"SGLang 0.4.0 is installed, supported: {', '.join(SUPPORTED_RELEASES)}" in result.stderr


def test_a_hook_that_sglang_renamed_is_refused_by_name(nursery: Nursery) -> None:
    result = nursery.run(
        """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.tokenizer_manager import TokenizerManager

def refusal():
    try:
        ServerArgs(model_path="none", schedule_policy="sage").check_server_args()
    except Exception as error:
        print(type(error).__name__, error)

def refusal_without(owner, name):
    kept = getattr(owner, name)
    delattr(owner, name)
    refusal()
    setattr(owner, name, kept)

# Before anything of ours is imported that imports it.
from sglang.srt.managers import scheduler
refusal_without(scheduler, "NextBatchPlan")
refusal_without(SchedulePolicy, "shortest_prefill_chunk_limit")
original = SchedulePolicy._validate_and_adjust_policy
del SchedulePolicy._validate_and_adjust_policy
SchedulePolicy._validate_policy = original
refusal()
SchedulePolicy._validate_and_adjust_policy = lambda self, requests: None
refusal()
SchedulePolicy._validate_and_adjust_policy = original
refusal_without(TokenizerManager, "_handle_batch_output")
from sglang.srt.mem_cache import common
common.release_kv_cache = lambda req, tree_cache, is_insert=True: None  # as it was in 0.5.21
refusal()
"""
    )
    plan, limit, gone, changed, gone_too, called = result.stdout.splitlines()[-6:]
    assert plan.startswith("UnsupportedServerError the function sglang.srt.managers.")
    assert "scheduler.NextBatchPlan" in plan
    assert "SchedulePolicy.shortest_prefill_chunk_limit" in limit
    for line in (limit, gone, changed, gone_too):
        assert line.startswith("UnsupportedServerError the hook sglang.srt.managers.")
        assert f"SGLang {version('sglang')}" in line
    assert "SchedulePolicy._validate_and_adjust_policy" in gone
    assert "has no parameter policy, tree_cache" in changed
    assert "TokenizerManager._handle_batch_output" in gone_too
    assert "release_kv_cache" in called
    assert "has no parameter checkpoint" in called


def test_a_plugin_that_is_not_loaded_leaves_no_policy_to_choose(nursery: Nursery) -> None:
    # SGLang logs what fails while a plugin loads, and goes on.
    result = launch(nursery, "--schedule-policy", "sage", SGLANG_PLUGINS="sage_cpu")
    assert result.returncode == 2
    assert "invalid choice: 'sage'" in result.stderr
