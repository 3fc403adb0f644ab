"""`sage-sched serve`: `sglang serve` with our policy."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_FLAG = "--schedule-policy"


def run(argv: list[str]) -> NoReturn:
    """Become `sglang serve argv`, with --schedule-policy sage unless argv names one."""
    named = any(arg == _FLAG or arg.startswith(_FLAG + "=") for arg in argv)
    policy = [] if named else [_FLAG, "sage"]
    serve = "import sys; from sglang.cli.main import main; sys.exit(main())"
    # -P: modules where it was started from must not take the place of SGLang's or ours.
    os.execv(sys.executable, [sys.executable, "-P", "-c", serve, "serve", *argv, *policy])
