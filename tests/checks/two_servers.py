"""Tests two servers behind a router, one of which is killed and restarted under load.

`python -m tests.checks.two_servers --smg PATH` follows docs/examples/two-servers.sh, with a small
model on the CPU and a folder of its own, and counts lost requests. PATH is the program of smg 1.13
(`python3 -m venv router && router/bin/pip install smg==1.13.0`, then router/bin/smg). Exit code 1
if requests were lost that did not run on the killed server; 2 if the example could not be followed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "two-servers.sh"
# Fewer slots than requests in flight, so some requests wait.
_FLAGS = (*CPU_ENGINE_FLAGS, "--max-total-tokens", "8192", "--max-running-requests", "4")
_LIMIT_S, _POLL_S = 1800.0, 0.2
# The script's shell stays in any case, so that the processes that it has started can be found.
_BEGIN = """trap 'echo $? > ended; sleep infinity' EXIT
total() { curl -s http://127.0.0.1:$2/metrics | awk "/^$1[{ ]/ {n += \\$NF} END {print n + 0}"; }
"""
_ANSWERED = "total sglang:num_requests_total"
# Events after some steps.
_AFTER = {
    3: f"""until [ $(wc -l < statuses.txt) -ge 60 ]; do sleep 0.2; done
({_ANSWERED} 30001; {_ANSWERED} 30002) > answered.txt
until [ $(total sage:backlog_seconds 30001) != 0 ]; do sleep 0.2; done
""",
    5: """wanted=$(($(wc -l < statuses.txt) + 60))
until [ $(wc -l < statuses.txt) -ge $wanted ]; do sleep 0.2; done
""",
    6: f"until [ $({_ANSWERED} 30002) -ge 30 ]; do sleep 0.2; done\n",
}


class NotFollowedError(RuntimeError):
    """The example stopped."""


def follow(script: str, folder: Path, env: dict[str, str]) -> None:
    """Run a script to its end, and kill the processes that it has started. Raises
    NotFollowedError."""
    command, ended = ["bash", "-e", "-c", script], folder / "ended"
    bash = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True)
    try:
        until_s = time.monotonic() + _LIMIT_S
        while not ended.exists() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
    finally:
        # Some of these may lead groups of their own.
        for process in psutil.Process(bash.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    if not ended.exists() or ended.read_text().strip() != "0":
        raise NotFollowedError(f"{EXAMPLE.name} did not come to its end")


def _script(folder: Path) -> str:
    """Return the example with a small model, and with waits between its steps."""
    model = " ".join([str(write_model(folder / "model")), *_FLAGS])
    steps = re.split(r"^# \d+\. .*\n", EXAMPLE.read_text(encoding="utf-8"), flags=re.M)[1:]
    waiting = [step + _AFTER.get(number, "") for number, step in enumerate(steps, 1)]
    return _BEGIN + "\n".join(waiting).replace("MODEL", model)


def _environment(smg: Path, folder: Path) -> dict[str, str]:
    """Return an environment with its own home for socket and store, and the user's token
    vectors."""
    path = f"{Path(sys.executable).parent}:{smg.parent}:{os.environ['PATH']}"
    home, cache = folder / "home", Path.home() / ".cache" / "sage-sched"
    (home / ".cache" / "sage-sched").mkdir(parents=True)
    for vectors in cache.glob("token-vectors-*"):
        shutil.copy(vectors, home / ".cache" / "sage-sched")
    env = os.environ | CPU_ENV | {"PATH": path, "HOME": str(home)}
    env.pop("XDG_CACHE_HOME", None)
    return env


def measure(smg: Path, folder: Path) -> int:
    """Follow the example, print the findings, and return the exit code."""
    follow(_script(folder), folder, _environment(smg, folder))
    statuses = (folder / "statuses.txt").read_text(encoding="utf-8")
    rows = [line.split() for line in statuses.splitlines()]
    killed_s = float((folder / "killed.txt").read_text(encoding="utf-8"))
    both = (folder / "answered.txt").read_text(encoding="utf-8").split()
    lost_s = [float(began_s) for _, began_s, _, _, came in rows if came != "whole"]
    num_late = sum(began_s > killed_s for began_s in lost_s)
    print(
        f"{len(rows)} requests; {both} answered by the two before the kill; {len(lost_s)} lost, "
        f"{num_late} of them after the kill"
    )
    is_doubled = len({number for number, *_ in rows}) < len(rows)
    return int(num_late > 0 or is_doubled or "0" in both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smg", type=Path, required=True, metavar="PATH", help="smg's program")
    smg = parser.parse_args().smg.absolute()
    # No server must outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    with tempfile.TemporaryDirectory(prefix="two-servers-") as folder:
        try:
            return measure(smg, Path(folder))
        except (NotFollowedError, OSError, ValueError) as error:
            print(f"two_servers: {error}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}:", log.read_text(errors="replace")[-1500:], file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
