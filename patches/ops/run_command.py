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

_EXAMPLE = "sage-sched run dynamo.sglang --model-path MODEL"
_HELP = f"""usage: sage-sched run MODULE [ARGUMENT ...]

Run a launcher of SGLang, as `python -m MODULE ARGUMENT ...` would, with our policies.

example: {_EXAMPLE}
`sage-sched run MODULE --help` shows the launcher's own help."""
_RUN = (
    "import runpy, sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
    "sys.argv[:] = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def run(argv: Sequence[str]) -> int:
    """Replace this process by the launcher argv[0], with the other arguments as its own."""
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if not argv or argv[0].startswith("-"):
        print(f"sage-sched run: name a module, as in `{_EXAMPLE}`", file=sys.stderr)
        return 2
    return os.execv(sys.executable, [sys.executable, "-c", _RUN, *argv])
