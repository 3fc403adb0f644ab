"""`sage-sched serve`: `sglang serve` with our policy."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from patches.flags import named

# SGLang takes seconds to import, and modules where it was started from must not take the place of
# its own or ours (-P). So all that needs SGLang is in the process that becomes the server.
_SERVE = (
    "import sys; from sage_sched.app.parts_finder import SERVING, find_parts; find_parts(SERVING); "
    "from patches.ops.serve_command import serve; sys.exit(serve())"
)
# SGLang's own help is written before it has loaded plugins, so it has none of their flags.
_HELP = (
    "from sglang.srt.plugins import load_plugins; load_plugins(); "
    "from sglang.srt.server_args import prepare_server_args; prepare_server_args(['--help'])"
)


def run(argv: Sequence[str]) -> int:
    """Become `sglang serve argv` (see with_policy), or print the help."""
    asks_for_help = bool({"-h", "--help"} & {*argv})
    names_model = bool(argv) and not argv[0].startswith("-")
    # Any abbreviation of --model-path, --model and --config will do, as SGLang takes them.
    names_model |= any(arg.startswith(("--m", "--conf")) for arg in argv)
    if not asks_for_help and not names_model:
        print(
            "sage-sched serve: name a model, as in `sage-sched serve --model-path MODEL`; "
            "--help has all flags",
            file=sys.stderr,
        )
        return 2
    code = ["-W", "ignore", "-c", _HELP] if asks_for_help else ["-c", _SERVE, "serve", *argv]
    return os.execv(sys.executable, [sys.executable, "-P", *code])


def serve() -> int:
    """Run `sglang serve` with the flags of this process, and a policy."""
    try:
        sys.argv[2:] = with_policy(sys.argv[2:])
    except (ValueError, OSError) as error:  # of the file that --config names
        print(f"sage-sched serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return int(importlib.import_module("sglang.cli.main").main() or 0)


def with_policy(argv: Sequence[str]) -> list[str]:
    """A server's flags, with a policy unless they name one; a server in shadow mode has SGLang's
    own. Raises ValueError and OSError if the file of --config cannot be read."""
    given, flags = named(argv), [*argv]
    if not {"schedule_policy", "sage_shadow"} & given.keys():
        flags += ["--schedule-policy", "sage"]
    # `sglang serve` does not look for the model in the file, and wants its flag in full.
    if "model_path" in given and not {"--model-path", "--model"} & {
        arg.split("=")[0] for arg in argv
    }:
        flags += ["--model-path", given["model_path"]]
    return flags
