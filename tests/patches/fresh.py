"""Fresh Python processes with SGLang, which takes 10 s to import: forked from one that has
imported what every process of a server does, and done nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

# A child leaves the loop and ends as a program of its own does.
_PARENT = """
import json, os, sys
import sglang.srt.plugins, sglang.srt.server_args
assert "sglang.srt.managers.scheduler" not in sys.modules
for name in sys.argv[1:]:
    __import__(name)
for line in iter(sys.stdin.readline, ""):
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, (name, flags) in enumerate(
    [(os.devnull, os.O_RDONLY), (task["stdout"], os.O_WRONLY), (task["stderr"], os.O_WRONLY)]
):
    os.dup2(os.open(name, flags), number)
os.environ.update(task["env"])
sys.argv = task["argv"]
exec(task["code"], {"__name__": "__main__"})
"""


class FreshProcesses:
    """In a `with` block; folder: for what they print. also: more modules that have been imported
    in all of them."""

    def __init__(self, folder: Path, *also: str) -> None:
        self._also = also
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _PARENT, *self._also]
        self._parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._parent.kill()
        self._parent.communicate()

    def run(self, code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Like `python -c code argv` with these variables added to the environment."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        for file in (self._stdout, self._stderr):
            file.write_text("")
        task = {
            "code": code,
            "argv": ["-c", *argv],
            "env": env,
            "stdout": str(self._stdout),
            "stderr": str(self._stderr),
        }
        self._parent.stdin.write(json.dumps(task) + "\n")
        self._parent.stdin.flush()
        exit_code = int(self._parent.stdout.readline())
        return subprocess.CompletedProcess(
            code, exit_code, self._stdout.read_text(), self._stderr.read_text()
        )
