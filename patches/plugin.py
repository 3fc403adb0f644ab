"""The plugin's entry point: what is hooked when.

Installed, it adds its policies to the choices of --schedule-policy and looks at what was chosen.
Every other hook is placed only once one of its policies is, in the process that needs it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from patches.compat import UnsupportedServerError, check_release
from predictor_store.config_file import read_config
from sage_sched.policy import policy_names

_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


def register() -> None:
    """Entry point of the group sglang.srt.plugins, called in every process of a server.

    A failure in here is only logged by SGLang; the policy then is no choice of --schedule-policy,
    and SGLang itself refuses it.
    """
    from patches.hook import AFTER, BEFORE, Hook, apply_all

    hooks = [
        Hook(f"{_ARGS}.add_cli_args", AFTER, _add_flags, ("parser",)),
        Hook(f"{_ARGS}.from_cli_args", AFTER, _read_flags, ("args",)),
        Hook(f"{_ARGS}.check_server_args", BEFORE, _activate_main, ()),
    ]
    # Hooking imports the target's module, which is for the scheduler's own process to do.
    if _SCHEDULER_MODULE in sys.modules:
        target = f"{_SCHEDULER_MODULE}.Scheduler.__init__"
        hooks.append(Hook(target, BEFORE, _activate_scheduler, ("server_args",)))
    apply_all(hooks)


def _is_ours(server_args: Any) -> bool:
    return server_args.schedule_policy in policy_names()


def _add_flags(result: None, parser: Any) -> None:
    for action in parser._actions:
        if "--schedule-policy" in action.option_strings:
            action.choices = [*action.choices, *policy_names()]
    parser.add_argument(
        "--sage-config",
        metavar="FILE",
        help="TOML or YAML file with the settings of sage-sched (default: the defaults, or the "
        "file that the environment variable SAGE_CONFIG names).",
    )


def _read_flags(server_args: Any, cls: type[Any], args: Any) -> Any:
    """On the command line, say what is wrong in one line."""
    if args.sage_config is not None and not _is_ours(server_args):
        raise SystemExit(
            f"sage-sched: --sage-config needs --schedule-policy {'|'.join(policy_names())}"
        )
    if _is_ours(server_args):
        try:
            _prepare(server_args, args.sage_config)
        except (ValueError, UnsupportedServerError) as error:  # ConfigError, a policy's
            raise SystemExit(f"sage-sched: {error}") from error
    return server_args


def _prepare(server_args: Any, config_path: str | None) -> None:
    from patches.dispatch import refuse_dispatch
    from patches.probe_setup import refuse_probe
    from patches.refusals import refuse_unsupported
    from patches.urgency import refuse_urgency

    check_release()
    refuse_unsupported(server_args)
    # Not one of the record's fields, so it may be set, and it travels to every process.
    server_args._sage_config = read_config(config_path or os.environ.get("SAGE_CONFIG"))
    refuse_probe(server_args, server_args._sage_config)
    refuse_urgency(server_args._sage_config.urgency)
    refuse_dispatch(server_args, server_args._sage_config)


def _activate_main(server_args: Any) -> None:
    """Before SGLang starts its processes: hook this one, and see that the others can be."""
    if not _is_ours(server_args):
        return
    if not hasattr(server_args, "_sage_config"):  # the Engine API, which has no command line
        _prepare(server_args, None)
    from patches.hook import apply_all, check_all
    from patches.predict import predict_hooks
    from patches.scheduler_hooks import scheduler_hooks

    check_all(scheduler_hooks(server_args._sage_config))
    apply_all(predict_hooks())
    if server_args.tokenizer_worker_num > 1:
        from patches.http_processes import main_process_hooks

        apply_all(main_process_hooks())


def _activate_scheduler(self: Any, server_args: Any, *args: Any, **kw: Any) -> None:
    if not _is_ours(server_args):
        return
    from patches.hook import apply_all
    from patches.scheduler_hooks import scheduler_hooks

    check_release()
    apply_all(scheduler_hooks(server_args._sage_config))
