"""`sage-sched serve`: `sglang serve` with our policy; and the flags of a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_FLAG = "--schedule-policy"
_SERVE = "import sys; from sglang.cli.main import main; sys.exit(main())"
# SGLang's own help is written before it has loaded plugins, so it has none of their flags.
_HELP = (
    "from sglang.srt.plugins import load_plugins; load_plugins(); "
    "from sglang.srt.server_args import prepare_server_args; prepare_server_args(['--help'])"
)


def run(argv: Sequence[str]) -> int:
    """Become `sglang serve argv` (see with_policy), or print the help."""
    asks_for_help = bool({"-h", "--help"} & {*argv})
    names_model = bool(argv) and not argv[0].startswith("-")
    names_model |= value_of(argv, "--model-path", "--model", "--config") is not None
    if not asks_for_help and not names_model:
        print(
            "sage-sched serve: name a model, as in `sage-sched serve --model-path MODEL`; "
            "--help has all flags",
            file=sys.stderr,
        )
        return 2
    # -P: modules where it was started from must not take the place of SGLang's or ours.
    command = [sys.executable, "-P"]
    if asks_for_help:
        command += ["-W", "ignore", "-c", _HELP]
    else:
        command += ["-c", _SERVE, "serve", *with_policy(argv)]
    return os.execv(sys.executable, command)


def with_policy(argv: Sequence[str]) -> list[str]:
    """A server's flags, with a policy; a server in shadow mode has SGLang's own."""
    is_complete = value_of(argv, _FLAG, "--sage-shadow") is not None
    return [*argv] if is_complete else [*argv, _FLAG, "sage"]


def value_of(argv: Sequence[str], *flags: str) -> str | None:
    """The value of the last of these flags that is given, as `--flag value` or `--flag=value`; ""
    if the value is missing. None if no flag is given."""
    found = None
    for arg, following in zip(argv, (*argv[1:], ""), strict=False):
        name, has_value, value = arg.partition("=")
        if name in flags:
            found = value if has_value else following
    return found
