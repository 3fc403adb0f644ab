"""The plugin's entry point: decides which hooks are placed, and when.

Once installed, the plugin adds its policies to the choices of --schedule-policy and checks the
chosen policy. All other hooks are placed only under one of its policies, in the process that needs
them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Any

from patches import refusals
from patches.compat import UnsupportedServerError, check_release, passing_for_fcfs
from patches.flags import FLAGS
from patches.hook import AFTER, AROUND, BEFORE, Hook, Hooks, check_calls
from predictor_store.config_file import read_config
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names

_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_CONTROLLER_MODULE = "sglang.srt.managers.data_parallel_controller"


def register() -> None:
    """Place the first hooks. Entry point of the group sglang.srt.plugins, called in every process.

    Trap: SGLang only logs a failure in here. Then --schedule-policy does not know our policies, and
    SGLang itself refuses them.
    """
    # Hooking imports the target's module, which should happen only in the process that runs it.
    first_hooks(sys.modules).apply()


def first_hooks(modules: Container[str]) -> Hooks:
    """Return the hooks that are placed before the policy is known.

    modules: the modules that this process has imported. They show whether it is a scheduler, a
        data-parallel controller, or another process.
    """
    hooks = Hooks(_main_hooks)
    if _SCHEDULER_MODULE in modules:
        target = f"{_SCHEDULER_MODULE}.Scheduler.__init__"
        hooks.append(Hook(target, BEFORE, _activate_scheduler, ("server_args",)))
    if _CONTROLLER_MODULE in modules:
        target = f"{_CONTROLLER_MODULE}.DataParallelController.__init__"
        hooks.append(Hook(target, BEFORE, _activate_controller, ("server_args",)))
    return hooks


_main_hooks = Hooks()


def _is_ours(server_args: Any) -> bool:
    return server_args.schedule_policy in policy_names()


def _is_shadowed(server_args: Any) -> bool:
    return getattr(server_args, "_sage_shadow", None) is not None


@_main_hooks.at(f"{_ARGS}.add_cli_args", AFTER, "parser")
def _add_flags(result: None, parser: Any) -> None:
    for action in parser._actions:
        if "--schedule-policy" in action.option_strings:
            action.choices = [*action.choices, *policy_names()]
    group = parser.add_argument_group(
        "sage-sched",
        f"--schedule-policy also takes {', '.join(policy_names())}. `sage-sched serve` "
        "uses sage unless one is named. docs/policies.md describes each policy, and "
        "docs/settings.md the settings.",
    )
    for flag, what in FLAGS.items():
        group.add_argument(flag, metavar="FILE", help=what)


@_main_hooks.at(f"{_ARGS}.from_cli_args", AFTER, "args")
def _read_flags(server_args: Any, cls: type[Any], args: Any) -> Any:
    # A launcher may have made its parser before the plugin was loaded.
    config, trace, shadow = (
        getattr(args, f"sage_{name}", None) for name in ("config", "trace", "shadow")
    )
    if shadow is not None:
        _in_one_line(lambda: _prepare_shadow(server_args, shadow, config))
        return server_args
    for flag, value in (("--sage-config", config), ("--sage-trace", trace)):
        if value is not None and not _is_ours(server_args):
            raise SystemExit(
                f"sage-sched: {flag} needs --schedule-policy {'|'.join(policy_names())}"
            )
    if _is_ours(server_args):
        _in_one_line(lambda: _prepare(server_args, config, trace))
    return server_args


def _in_one_line(call: Callable[[], None]) -> None:
    """End the process with one line if a flag or a setting is wrong, or a file cannot be used."""
    from predictor_store.store.file import StoreError

    try:
        call()
    except (ValueError, OSError, UnsupportedServerError, StoreError) as error:
        raise SystemExit(f"sage-sched: {error}") from error


def _prepare(server_args: Any, config_path: str | None, trace_path: str | None) -> None:
    from patches.probe.setup import refuse_probe
    from sage_sched.app.switch import Settings

    check_release()
    ours = f"--schedule-policy {server_args.schedule_policy}"
    refusals.refuse(server_args, ours, refusals.REFUSED)
    config = _read_settings(server_args, config_path)
    server_args._sage_trace = trace_path or os.environ.get("SAGE_TRACE") or None
    if server_args._sage_trace is not None:
        refusals.refuse_place("--sage-trace", server_args._sage_trace)
    refuse_probe(server_args, config)
    Settings(server_args.schedule_policy, config)  # raises if they do not go together


def _prepare_shadow(server_args: Any, file: str, config_path: str | None) -> None:
    if _is_ours(server_args):
        raise ValueError(
            f"--sage-shadow is for SGLang's own policies: {server_args.schedule_policy} already "
            "predicts, and uses its predictions"
        )
    check_release()
    refusals.refuse(server_args, "--sage-shadow", refusals.REFUSED_WITH_SHADOW)
    refusals.refuse_place("--sage-shadow", file)
    _read_settings(server_args, config_path)
    server_args._sage_shadow = os.path.abspath(file)


def _read_settings(server_args: Any, config_path: str | None) -> SageConfig:
    # This attribute is not a field of ServerArgs, but SGLang passes it on to every process.
    config = read_config(config_path or os.environ.get("SAGE_CONFIG"))
    server_args._sage_config = config
    return config


def _refuse_store(server_args: Any) -> None:
    """End the process with one line, before the model is loaded, if another server uses the
    store."""
    from predictor_store.store.store import refuse_in_use

    config: SageConfig = server_args._sage_config
    # A prefill server keeps no history.
    if not config.predictor.service and server_args.disaggregation_mode != "prefill":
        _in_one_line(lambda: refuse_in_use(config.store))


@_main_hooks.at(f"{_ARGS}.check_server_args", AROUND)
def _around_check(original: Callable[[Any], None], server_args: Any) -> None:
    _activate_main(server_args)
    with passing_for_fcfs(server_args) if _is_ours(server_args) else nullcontext():
        original(server_args)


def _activate_main(server_args: Any) -> None:
    """Hook this process and check the hooks of the others, before SGLang starts them."""
    if not _is_shadowed(server_args) and not _is_ours(server_args):
        return
    if hasattr(server_args, "_sage_config"):
        _refuse_store(server_args)
    else:  # the Engine API has no command line: the worker reports a bad store
        _prepare(server_args, None, None)
    is_shadowed = _is_shadowed(server_args)
    if not is_shadowed:  # first, because importing the hooks needs some of these calls
        check_calls()
    _scheduler_hooks(server_args).check()
    if is_shadowed:
        from patches.ops.shadow import shadow_http_hooks

        shadow_http_hooks.apply()
        return
    from patches.http.hooks import http_hooks, router_hooks, serve_our_app

    http_hooks.apply()
    if server_args.tokenizer_worker_num > 1:
        serve_our_app()
        router_hooks.apply()


def _scheduler_hooks(server_args: Any) -> Hooks:
    """Return the hooks that this server's schedulers need."""
    if _is_shadowed(server_args):
        from patches.ops.shadow import shadow_scheduler_hooks

        return shadow_scheduler_hooks(server_args._sage_config)
    if _is_ours(server_args):
        from patches.scheduler.hooks import scheduler_hooks

        return scheduler_hooks(server_args._sage_config)
    return Hooks()


def _activate_scheduler(self: Any, server_args: Any, *args: Any, **kw: Any) -> None:
    _scheduler_hooks(server_args).apply()


def _activate_controller(self: Any, server_args: Any, *args: Any, **kw: Any) -> None:
    if _is_ours(server_args):
        # The controller forwards unknown messages only if it can decode them.
        importlib.import_module("patches.messages")
