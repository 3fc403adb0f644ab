from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.compat import UnsupportedServerError
from patches.hook import check_target
from patches.refusals import REFUSED, REFUSED_WITH_SHADOW, refuse
from predictor_store.store.store import Store, refuse_in_use
from sage_sched.app.config import StoreConfig
from tests.nursery import Nursery

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


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
print(*sorted(HookRegistry._patched))
print(*{name for (cls, name), value in before.items() if getattr(cls, name) is not value})
"""
    )
    assert result.returncode == 0, result.stderr
    patched, touched = result.stdout.splitlines()[-2:]
    assert patched.split() == [
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.check_server_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]
    assert touched == "__init__"


def test_a_store_in_use_is_said_in_one_line(nursery: Nursery, tmp_path: Path) -> None:
    store, settings = tmp_path / "store", tmp_path / "sage.toml"
    settings.write_text(f'[store]\npath = "{store}"\n')
    flags = ["--model-path", "none", "--device", "cpu", "--sage-config", str(settings)]
    flags += ["--sage-shadow", str(tmp_path / "record")]
    config = StoreConfig(path=str(store))
    with Store(config, "any", 8):
        refused = nursery.run(
            f"""
from predictor_store.store import store
store.refuse_in_use.__defaults__ = (0.0,)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args({flags})  # which `sage-sched doctor` has looked at, too
args.check_server_args()
"""
        )
    assert f"sage-sched: the store {store} is in use by" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    refuse_in_use(config, 0.0)  # the lock is free again


REFUSING = [
    ["--sage-trace", "/no/such/folder/trace"], ["--sage-config", "no-such-file.toml"],
    ["--use-ray"], ["--grpc-mode"], ["--pp-size", "2"], ["--is-embedding"],
]  # fmt: skip
REFUSING_SHADOWS = [
    ["--schedule-policy", "sage"], ["--skip-tokenizer-init"], ["--tokenizer-worker-num", "2"],
    ["--disaggregation-mode", "decode"], ["--sage-shadow", "/no/such/folder/record"],
]  # fmt: skip


def test_what_it_cannot_serve_is_refused_in_one_line(nursery: Nursery, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    result = nursery.run(
        f"""
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
shadow = ["--model-path", "none", "--sage-shadow", {str(record)!r}]
for base, each in ((["--model-path", "none", "--schedule-policy", "sage"], {REFUSING}),
                   (shadow, {REFUSING_SHADOWS})):
    for flags in each:
        try:
            prepare_server_args(base + flags)
            print("accepted", flags)
        except SystemExit as refusal:
            assert str(refusal).startswith("sage-sched: "), (flags, refusal)
args = prepare_server_args(shadow + ["--schedule-policy", "lpm", "--enable-priority-scheduling"])
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
    kept, hooked = result.stdout.splitlines()[-2:]
    assert (kept, hooked) == (str(record), "[False, True, False]"), result.stderr
    assert "accepted" not in result.stdout
    assert not record.exists()


DECLARED = {**REFUSED, **REFUSED_WITH_SHADOW}


def named(declared: str) -> list[str]:
    """The attributes of ServerArgs that declared reasons name."""
    return [flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", declared)]


@pytest.mark.parametrize("what", DECLARED)
def test_each_declared_reason_is_a_refusal(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: dict[str, Any] = dict.fromkeys([*named(" ".join(DECLARED)), "grpc_mode"], 0)
    plain["disaggregation_mode"] = "null"
    refuse(SimpleNamespace(**plain), "ours", DECLARED)
    monkeypatch.setattr("patches.refusals.serves_named_app", lambda: "0.5.22" not in what)
    for variable in re.findall(r"SGLANG_\w+", what):
        monkeypatch.setenv(variable, "1")
    asked = SimpleNamespace(**{**plain, **dict.fromkeys(named(what), 2)})
    with pytest.raises(UnsupportedServerError, match=re.escape(what)):
        refuse(asked, "ours", {what: DECLARED[what]})


def test_the_last_line_names_the_error(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "sage.toml").write_text("")
    module = "import runpy; runpy.run_module('sglang.launch_server', run_name='__main__')"
    config = str(tmp_path / "sage.toml")
    result = nursery.run(module, "--model-path", "no-such-model", "--sage-config", config)
    assert result.returncode == 1
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("sage-sched: --sage-config needs --schedule-policy ")
    assert "sage" in last_line.split()[-1].split("|")


def test_a_release_and_hooks_that_do_not_fit_are_refused_by_name(nursery: Nursery) -> None:
    result = nursery.run(
        """
import sglang.version
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.tokenizer_manager import TokenizerManager
# Before anything of ours is imported that imports it.
from sglang.srt.managers import scheduler
from sglang.srt.mem_cache import common

def refusal_with(owner, name, changed=None):
    kept = getattr(owner, name)
    setattr(owner, name, changed) if changed else delattr(owner, name)
    try:
        ServerArgs(model_path="none", schedule_policy="sage").check_server_args()
    except Exception as error:
        print(type(error).__name__, error)
    setattr(owner, name, kept)

refusal_with(sglang.version, "__version__", "0.4.0")
refusal_with(scheduler, "NextBatchPlan")
refusal_with(SchedulePolicy, "shortest_prefill_chunk_limit")
refusal_with(SchedulePolicy, "_validate_and_adjust_policy", lambda self, requests: None)
refusal_with(TokenizerManager, "_handle_batch_output")
# As it was in 0.5.21.
refusal_with(common, "release_kv_cache", lambda req, tree_cache, is_insert=True: None)
"""
    )
    named = (
        "SGLang 0.4.0 is installed", "scheduler.NextBatchPlan",
        "SchedulePolicy.shortest_prefill_chunk_limit", "has no parameter policy, tree_cache",
        "TokenizerManager._handle_batch_output", "has no parameter checkpoint",
    )  # fmt: skip
    for line, name in zip(result.stdout.splitlines()[-6:], named, strict=True):
        assert line.startswith("UnsupportedServerError ")
        assert name in line


def test_the_installed_sglang_fits(nursery: Nursery) -> None:
    # In a process of its own, as it imports much of SGLang.
    done = nursery.run("from patches.ops.fit import main; assert main() == 0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" fits")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wanting").mkdir()
    (tmp_path / "wanting" / "__init__.py").write_text("")
    (tmp_path / "wanting" / "batch.py").write_text("import not_installed_here\nclass Batch: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedServerError, match="No module named 'not_installed_here'"):
        check_target("hook", "wanting.batch.Batch.run", ())
    with pytest.raises(UnsupportedServerError, match="has no attribute 'Batch'"):
        check_target("hook", "wanting.Batch.run", ())
