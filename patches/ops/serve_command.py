"""Implements `sage-sched serve`, which runs `sglang serve` with our policy."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from patches.flags import named

# SGLang takes seconds to import, so only the process that becomes the server imports it. With -P,
# modules in the working directory cannot shadow SGLang's or ours.
_SERVE = f"import sys; from {__name__} import serve; sys.exit(serve())"
# SGLang writes its own help before it has loaded plugins, so their flags are missing there.
_HELP = (
    "from sglang.srt.plugins import load_plugins; load_plugins(); "
    "from sglang.srt.server_args import prepare_server_args; prepare_server_args(['--help'])"
)


def run(argv: Sequence[str]) -> int:
    """Replace this process by `sglang serve argv` (see with_policy), or by a process that prints
    the help. Return 2 if no model is named."""
    asks_for_help = bool({"-h", "--help"} & {*argv})
    names_model = bool(argv) and not argv[0].startswith("-")
    # Any abbreviation of --model-path, --model and --config will do, as for SGLang.
    names_model |= any(arg.startswith(("--m", "--conf")) for arg in argv)
    if not asks_for_help and not names_model:
        print(
            "sage-sched serve: name a model, as in `sage-sched serve --model-path MODEL`; "
            "--help lists all flags",
            file=sys.stderr,
        )
        return 2
    code = ["-W", "ignore", "-c", _HELP] if asks_for_help else ["-c", _SERVE, "serve", *argv]
    return os.execv(sys.executable, [sys.executable, "-P", *code])


def serve() -> int:
    """Run `sglang serve` with the flags of this process, and a policy."""
    try:
        sys.argv[2:] = with_policy(sys.argv[2:])
    except (ValueError, OSError) as error:  # the --config file cannot be read
        print(f"sage-sched serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return int(importlib.import_module("sglang.cli.main").main() or 0)


def with_policy(argv: Sequence[str]) -> list[str]:
    """Return a server's flags, with `--schedule-policy sage` added unless they name a policy or
    turn on shadow mode. A server in shadow mode keeps SGLang's own policy. Raises ValueError or
    OSError if the --config file cannot be read."""
    given, flags = named(argv), [*argv]
    if not {"schedule_policy", "sage_shadow"} & given.keys():
        flags += ["--schedule-policy", "sage"]
    # `sglang serve` does not read the model from the file, and needs its flag in full.
    if "model_path" in given and not {"--model-path", "--model"} & {
        arg.split("=")[0] for arg in argv
    }:
        flags += ["--model-path", given["model_path"]]
    return flags
