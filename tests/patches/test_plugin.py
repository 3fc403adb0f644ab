from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patches.compat import UnsupportedServerError, passing_for_fcfs
from patches.platform import activate
from patches.refusals import REFUSED, REFUSED_WITH_SHADOW, refuse, refuse_model
from predictor_store.store.store import Store
from sage_sched.app.config import StoreConfig
from tests.nursery import Nursery

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("SAGE_CONFIG", "SAGE_TRACE"):
        monkeypatch.delenv(variable, raising=False)


# Without a policy of ours no scheduling code is touched.
FIRST_HOOKS = [
    "sglang.srt.managers.scheduler.Scheduler.__init__",
    *(f"sglang.srt.server_args.ServerArgs.{method}"
      for method in ("add_cli_args", "check_server_args", "from_cli_args")),
]  # fmt: skip
# Starts servers until SGLang looks for their model, and prints the outcome of each.
STARTS = """
import json, os, sys
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter as Router
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print(json.dumps(sorted(HookRegistry._patched)))
from sglang.srt.server_args import prepare_server_args
from predictor_store.store import store
store.refuse_in_use.__defaults__ = (0.0,)

def depth(function):
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0

for flags, env in json.loads(sys.argv[1]):
    os.environ.update(env)
    try:
        args = prepare_server_args(["--model-path", "none", *flags])
        try:
            args.check_server_args()
        except TypeError:
            pass  # SGLang's own check looks for the model; ours comes before
        told = [getattr(args, name, None) for name in ("_sage_trace", "_sage_shadow")]
        told.append(os.environ.get("SGLANG_HTTP_SERVER_APP_PATH"))
        told.append([depth(one) for one in (Manager._init_req_state, Manager.abort_request,
                                            Router.__init__, Scheduler.get_new_batch_prefill)])
        print(json.dumps(told))
    except SystemExit as refusal:
        print(json.dumps(str(refusal)))
    for name in env:
        del os.environ[name]
"""


SETTINGS = {
    "free": "", "used": "", "served": "predictor.service = '/no.socket'\n",
}  # fmt: skip


def starts_in(folder: Path) -> list[tuple[list[str], dict[str, str], Any]]:
    """Return flags and variables of servers, each with words of its refusal, or with its trace, its
    record, its app and its hooks."""
    free, used, served = (f"{folder}/{name}.toml" for name in SETTINGS)
    trace, nowhere = f"{folder}/trace", "/no/such/folder/trace"
    ours, needs = ["--schedule-policy", "sage"], " needs --schedule-policy "
    shadow = ["--sage-shadow", "a.record", "--sage-config", free]
    in_use = f"the store {folder}/used is in use by process "
    hooked, app = [1, 1, 0, 0], "sage_sched.entry_points:app"
    return [
        *(([*ours, *more], {}, refusal) for more, refusal in (
            (["--sage-trace", nowhere], "--sage-trace is "),
            (["--sage-config", "no-such-file.toml"], "[Errno 2] No such file"),
            (["--use-ray"], "--use-ray"), (["--grpc-mode"], "--smg-grpc-mode"),
            (["--pp-size", "2"], "--pp-size above 1"), (["--is-embedding"], "--is-embedding"),
            (["--sage-config", used], in_use),
            (["--sage-config", used, "--disaggregation-mode", "decode"], in_use))),
        *(([*shadow, *more], {}, refusal) for more, refusal in (
            (ours, "--sage-shadow is for SGLang's own policies"),
            (["--skip-tokenizer-init"], "--skip-tokenizer-init"),
            (["--tokenizer-worker-num", "2"], "--tokenizer-worker-num above 1"),
            (["--disaggregation-mode", "decode"], "--disaggregation-mode"),
            (["--sage-shadow", nowhere], "--sage-shadow is "), (["--sage-config", used], in_use))),
        (["--sage-config", free], {}, f"--sage-config{needs}"),
        (["--sage-trace", trace], {}, f"--sage-trace{needs}"),
        (ours, {"SAGE_TRACE": nowhere}, "--sage-trace is "),
        (ours, {"SAGE_CONFIG": used}, in_use),
        ([*shadow, "--schedule-policy", "lpm", "--enable-priority-scheduling"], {},
         [None, f"{Path.cwd()}/a.record", None, [1, 0, 0, 0]]),
        (ours, {"SAGE_CONFIG": free, "SAGE_TRACE": trace}, [trace, None, None, hooked]),
        ([*ours, "--sage-config", free, "--sage-trace", trace], {"SAGE_CONFIG": used},
         [trace, None, None, hooked]),
        # A prefill server keeps no history.
        ([*ours, "--sage-config", used, "--disaggregation-mode", "prefill"], {},
         [None, None, None, hooked]),
        ([*ours, "--sage-config", served], {}, [None, None, None, hooked]),
        ([*ours, "--tokenizer-worker-num", "2"], {}, [None, None, app, [1, 1, 1, 0]]),
    ]  # fmt: skip


def test_servers_start_or_say_in_one_line_why_not(nursery: Nursery, tmp_path: Path) -> None:
    for name, more in SETTINGS.items():
        (tmp_path / f"{name}.toml").write_text(f'{more}store.path = "{tmp_path}/{name}"\n')
    starts = starts_in(tmp_path)
    with Store(StoreConfig(path=str(tmp_path / "used")), "any", 8):
        result = nursery.run(STARTS, json.dumps([(flags, env) for flags, env, _ in starts]))
    lines = result.stdout.splitlines()[-len(starts) - 1 :]
    first, *found = map(json.loads, lines)
    assert first == FIRST_HOOKS, result.stderr
    for (flags, _, expected), told in zip(starts, found, strict=True):
        if isinstance(expected, str):
            assert expected in told, flags
            assert told.startswith("sage-sched: "), told
        else:
            assert told == expected, flags
    assert {*tmp_path.iterdir()} == {tmp_path / "used", *tmp_path.glob("*.toml")}


DECLARED = {**REFUSED, **REFUSED_WITH_SHADOW}


def named(declared: str) -> list[str]:
    """Return the attributes of ServerArgs that declared reasons name."""
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


def test_all_refused_features_are_named_at_once() -> None:
    asked = SimpleNamespace(skip_tokenizer_init=True, pp_size=2, use_ray=False)
    names = "--use-ray", "--skip-tokenizer-init", "--pp-size above 1"
    with pytest.raises(UnsupportedServerError, match=r"--skip.*; nor with --pp-size above 1: its"):
        refuse(asked, "ours", {name: REFUSED[name] for name in names})


def test_a_model_that_generates_nothing_is_refused() -> None:
    refuse_model(SimpleNamespace(is_generation=True, model_path="M"))
    with pytest.raises(UnsupportedServerError, match="M does not generate"):
        refuse_model(SimpleNamespace(is_generation=False, model_path="M"))


def test_sglangs_check_sees_fcfs_alone() -> None:
    """SGLang refuses other policies with --enable-priority-scheduling."""
    args = SimpleNamespace(_resolved_overrides=[], enable_priority_scheduling=True)
    with passing_for_fcfs(args):
        assert args._resolved_overrides == [("sage-sched", {"schedule_policy": "fcfs"})]
    assert args._resolved_overrides == []


@pytest.mark.parametrize(
    ("named", "uses_sglangs", "has_gpu", "is_ours"),
    [
        ("", "", False, True), ("", "", True, False), ("", "1", False, False),
        ("", "0", False, True), ("sage_cpu", "1", True, True), ("other", "", True, False),
    ],
)  # fmt: skip
def test_a_host_without_an_accelerator_is_ours(
    named: str, uses_sglangs: str, has_gpu: bool, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: has_gpu)
    monkeypatch.setenv("SGLANG_PLATFORM", named)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", uses_sglangs)
    assert activate() == ("patches.platform.cpu:CpuPlatform" if is_ours else None)


def test_only_misfits_are_refused_by_name(nursery: Nursery) -> None:
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

for owner, name, changed in (
    (sglang.version, "__version__", "0.4.0"),
    (scheduler, "NextBatchPlan", None),
    (SchedulePolicy, "shortest_prefill_chunk_limit", None),
    (SchedulePolicy, "_validate_and_adjust_policy", lambda self, requests: None),
    (TokenizerManager, "_handle_batch_output", None),
    # As it was in 0.5.21.
    (common, "release_kv_cache", lambda req, tree_cache, is_insert=True: None),
):
    kept = getattr(owner, name)
    setattr(owner, name, changed) if changed else delattr(owner, name)
    try:
        ServerArgs(model_path="none", schedule_policy="sage").check_server_args()
    except Exception as error:
        print(type(error).__name__, error)
    setattr(owner, name, kept)
for release in ("0.4.0", sglang.version.__version__):
    kept, sglang.version.__version__ = sglang.version.__version__, release
    try:
        from patches.http.worker import app
    except Exception as error:
        print(type(error).__name__, error)
    sglang.version.__version__ = kept
from sglang.srt.entrypoints import http_server
assert app is http_server.app and hasattr(TokenizerManager.get_internal_state, "__wrapped__")
from patches.ops.fit import main
assert main() == 0
del TokenizerManager._handle_batch_output
assert main() == 1
"""
    )
    assert result.returncode == 0, result.stdout + result.stderr
    *refused, fits, misfit, number = result.stdout.splitlines()[-10:]
    named = (
        "SGLang 0.4.0 is installed", "scheduler.NextBatchPlan",
        "SchedulePolicy.shortest_prefill_chunk_limit", "has no parameter policy, tree_cache",
        "TokenizerManager._handle_batch_output", "has no parameter checkpoint",
        "SGLang 0.4.0 is installed",
    )  # fmt: skip
    for line, name in zip(refused, named, strict=True):
        assert (line.partition(" ")[0], name in line) == ("UnsupportedServerError", True), line
    assert (fits.endswith(" fits"), number.endswith(": 1 misfits")) == (True, True)
    assert "TokenizerManager._handle_batch_output" in misfit
