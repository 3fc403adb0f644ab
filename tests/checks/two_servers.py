"""Tests two servers behind a router, one of which is killed and restarted under load.

`python -m tests.checks.two_servers --smg PATH` types docs/examples/two-servers.sh into one shell,
with a small model on the CPU and a folder of its own, and counts lost requests. PATH is the program
of smg 1.13 (`python3 -m venv router && router/bin/pip install smg==1.13.0`, then router/bin/smg).
Exit code 1 if requests were lost that did not run on the killed server; 2 if the example could not
be followed.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "two-servers.sh"
_FIRST, _SECOND = "http://127.0.0.1:30001", "http://127.0.0.1:30002"
_GAUGE, _ANSWERED = "sage:backlog_seconds", "sglang:num_requests_total"
# Fewer slots than requests in flight, so some requests wait.
_FLAGS = (*CPU_ENGINE_FLAGS, "--max-total-tokens", "8192", "--max-running-requests", "4")
_LIMIT_S, _POLL_S = 900.0, 0.2


class NotFollowedError(RuntimeError):
    """The example stopped."""


def value(url: str, name: str) -> float:
    """Return the sum of a series on a server's /metrics."""
    text = requests.get(f"{url}/metrics", timeout=60).text
    return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M)))


@contextmanager
def shell(folder: Path, env: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that types a text into one bash and returns once it is done. It raises
    NotFollowedError. bash is killed with all processes that it started."""
    bash = subprocess.Popen(
        ["bash", "-e"], cwd=folder, env=env, stdin=subprocess.PIPE, start_new_session=True
    )
    assert bash.stdin is not None
    typed, done = bash.stdin, folder / "done"

    def types(text: str) -> None:
        done.unlink(missing_ok=True)
        typed.write(f"{text}\ntouch {done}\n".encode())
        typed.flush()
        wait_for(lambda: done.exists() or bash.poll() is not None, text)
        if not done.exists():
            raise NotFollowedError(text)

    try:
        yield types
    finally:
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            # Some of these may lead groups of their own.
            started = psutil.Process(bash.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(bash.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        bash.wait()


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Wait until a condition holds, and return the seconds. Raises NotFollowedError."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > _LIMIT_S:
            raise NotFollowedError(f"waited in vain for {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s


def _typed(folder: Path) -> list[str]:
    """Return the commands of the example, step by step, with a small model."""
    model = " ".join([str(write_model(folder / "model")), *_FLAGS])
    steps = re.split(r"^# \d+\. .*\n", EXAMPLE.read_text(encoding="utf-8"), flags=re.M)[1:]
    return [code.replace("MODEL", model) for code in steps]


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


def _asked(folder: Path) -> list[tuple[str, float, bool]]:
    """Return the requests recorded by now: number, start in seconds, and whether the whole answer
    came."""
    statuses = folder / "statuses.txt"
    text = statuses.read_text(encoding="utf-8") if statuses.exists() else ""
    rows = (line.split() for line in text.splitlines())
    return [(number, float(began_s), came == "whole") for number, began_s, _, _, came in rows]


def measure(smg: Path, folder: Path) -> int:
    """Follow the example, print the findings, and return the exit code."""

    def wait_for_answers() -> None:
        wanted = len(_asked(folder)) + 60
        wait_for(lambda: len(_asked(folder)) >= wanted, "60 ends of requests")

    serve, route, load, look, kill, restart, end = _typed(folder)
    with shell(folder, _environment(smg, folder)) as types:
        for text in (serve, route, load):
            types(text)
        wait_for_answers()
        both = [value(url, _ANSWERED) for url in (_FIRST, _SECOND)]
        wait_for(lambda: value(_FIRST, _GAUGE) > 0, f"{_GAUGE} above 0")
        types(look)
        types(kill)
        wait_for_answers()
        types(restart)
        back_s = wait_for(lambda: value(_SECOND, _ANSWERED) >= 30, "30 answers of the other")
        types(end)
    found = _asked(folder)
    killed_s = float((folder / "killed.txt").read_text(encoding="utf-8"))
    lost = [began_s for _, began_s, is_whole in found if not is_whole]
    num_late = sum(began_s > killed_s for began_s in lost)
    print(
        f"{len(found)} requests; {both} answered by the two before the kill, 30 by the second "
        f"{back_s:.0f} s after its return; {len(lost)} lost, {num_late} of them after the kill"
    )
    is_doubled = len({number for number, *_ in found}) < len(found)
    return int(num_late > 0 or is_doubled or min(both) == 0)


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
