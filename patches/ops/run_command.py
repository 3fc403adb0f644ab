"""Implements `sage-sched run MODULE [args]`, which runs any Python launcher of SGLang with our
policies.

`dynamo.sglang` and others build SGLang's argument parser before SGLang has loaded its plugins, so
they refuse `--schedule-policy sage`. This command loads the plugins first, then runs the module as
`python -m MODULE` would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_USAGE = "sage-sched run: name a module, as in `sage-sched run dynamo.sglang --model-path MODEL`"
_RUN = (
    "import runpy, sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
    "sys.argv[:] = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def run(argv: Sequence[str]) -> int:
    """Replace this process by the launcher argv[0], with the other arguments as its own."""
    if not argv or argv[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        return 0 if {"-h", "--help"} & {*argv} else 2
    return os.execv(sys.executable, [sys.executable, "-c", _RUN, *argv])
