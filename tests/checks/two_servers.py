"""Tests two servers behind a router, one of which is killed and restarted under load.

`python -m tests.checks.two_servers --smg PATH` types docs/examples/two-servers.sh into one shell,
with a small model on the CPU and a folder of its own, and counts lost requests. PATH is the program
of smg 1.13 (`python3 -m venv router && router/bin/pip install smg==1.13.0`, then router/bin/smg).
Exit code 1 if requests were lost that did not run on the killed server, or the gauge is not a
single one; 2 if the example could not be followed.

With `--apart prefill` (or decode) one server prefills, the other decodes, and the named one is
killed. Exit code 1 if a request was lost without an error that gives the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families

from bench.engines.server.model import write_model
from bench.engines.server.policy_server import CPU_ENGINE_FLAGS, CPU_ENV
from tests.checks import mooncake_stand_in
from tests.checks.pair import flags_of

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "two-servers.sh"
_FIRST, _SECOND = "http://127.0.0.1:30001", "http://127.0.0.1:30002"
_GAUGE, _ANSWERED = "sage:backlog_seconds", "sglang:num_requests"
# Fewer slots than requests in flight, so some requests wait.
_FLAGS = (*CPU_ENGINE_FLAGS, "--max-total-tokens", "8192", "--max-running-requests", "4")
_MODES, _BOOTSTRAP_PORT = ("prefill", "decode"), 30011
# MODEL and both servers' flags are filled in.
_APART = """
prefill() {{ sage-sched serve --model-path MODEL {prefill} --port 30001 > 30001.log 2>&1 & }}
decode() {{ sage-sched serve --model-path MODEL {decode} --port 30002 > 30002.log 2>&1 & }}
ready() {{ until curl -sf http://127.0.0.1:$1; do sleep 1; done; }}
prefill
prefill=$!
decode
decode=$!
prefill_port=30001
decode_port=30002
ready 30001/health
ready 30002/health
smg launch --pd-disaggregation --prefill http://127.0.0.1:30001 {port} \\
    --decode http://127.0.0.1:30002 --port 30000 --disable-worker-overload-protection \\
    --worker-wedge-secs 60 --health-check-interval-secs 5 > smg.log 2>&1 &
ready 30000/readiness
"""
_LIMIT_S, _POLL_S = 900.0, 0.2
_END = "what was typed has ended"


class NotFollowedError(RuntimeError):
    """The example stopped. The message has its last output."""


def steps() -> list[str]:
    """Return the commands of the example, step by step."""
    return re.split(r"^# \d+\. .*\n", EXAMPLE.read_text(encoding="utf-8"), flags=re.M)[1:]


@dataclass(frozen=True, slots=True)
class Asked:
    """A line of statuses.txt. is_whole: whether the whole answer came."""

    number: int
    began_s: float
    is_whole: bool


def read_statuses(text: str) -> list[Asked]:
    """Return the requests of statuses.txt. A line has number, time, HTTP status, curl's exit
    status, and whether the whole answer came."""
    rows = (line.split() for line in text.splitlines())
    return [Asked(int(number), float(s), came == "whole") for number, s, _, _, came in rows]


def unexplained(asked: Sequence[Asked], killed_s: float) -> list[int]:
    """Return the numbers of the requests that were lost, although they came after the kill."""
    return [each.number for each in asked if not each.is_whole and each.began_s > killed_s]


def gauge(text: str) -> float:
    """Return the seconds of backlog in the text of /metrics. Raises ValueError unless it has
    exactly one such gauge."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    family = families.get(_GAUGE)
    if family is None or family.type != "gauge" or len(family.samples) != 1:
        raise ValueError(f"{_GAUGE} is not one gauge of one series: {family}")
    return float(family.samples[0].value)


def num_answered(text: str) -> int:
    """Return the number of requests that a server has answered, by its /metrics."""
    samples = (
        sample.value
        for family in text_string_to_metric_families(text)
        if family.name == _ANSWERED
        for sample in family.samples
        if sample.name == f"{_ANSWERED}_total"
    )
    return int(sum(samples))


class Shell:
    """A bash that takes one text after another. It is killed with all processes that it started."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._folder, self._env = folder, env

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            ["bash", "-e"],
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            # Some of these may lead groups of their own.
            started = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def types(self, text: str) -> str:
        """Type a text and return its output. Raises NotFollowedError if a command fails or takes
        too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{text}\necho '{_END}'\n".encode())
        self._process.stdin.flush()
        deadline_s, said = time.monotonic() + _LIMIT_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not said.endswith(f"{_END}\n".encode()):
                # Background processes keep the pipe open after bash has ended.
                has_ended = self._process.poll() is not None
                if selector.select(_POLL_S):
                    said += os.read(self._process.stdout.fileno(), 1 << 16)
                elif has_ended or time.monotonic() > deadline_s:
                    raise NotFollowedError(f"{text}\n{said.decode()}")
        return said.decode().removesuffix(f"{_END}\n")


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Wait until a condition holds, and return the seconds. Raises NotFollowedError."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > _LIMIT_S:
            raise NotFollowedError(f"waited in vain for {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s


def _typed(folder: Path) -> list[str]:
    """Return the steps of the example, with a small model."""
    model = " ".join([str(write_model(folder / "model")), *_FLAGS])
    return [code.replace("MODEL", model) for code in steps()]


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


def _asked(folder: Path) -> list[Asked]:
    """Return the requests recorded by now."""
    statuses = folder / "statuses.txt"
    return read_statuses(statuses.read_text(encoding="utf-8")) if statuses.exists() else []


def _killed_s(folder: Path) -> float:
    return float((folder / "killed.txt").read_text(encoding="utf-8"))


def reason(answer: str) -> str:
    """Return the error message for a client whose answer did not come, from the body or an event of
    its stream, or ""."""
    for event in answer.split("data: "):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            error = json.loads(event)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
    return ""


def typed_apart(model: str) -> str:
    """Commands that start a prefill server, a decode server and a router."""
    flags = {mode: " ".join(flags_of(mode, _BOOTSTRAP_PORT)) for mode in _MODES}
    return _APART.format(port=_BOOTSTRAP_PORT, **flags).replace("MODEL", model)


def measure_apart(smg: Path, folder: Path, killed: str) -> int:
    """Follow the example with a prefill and a decode server, one of which is `killed`. Print the
    lost requests and the errors that clients got, and return the exit code."""
    *_, load, _, _, _, end = _typed(folder)
    begin = typed_apart(" ".join([str(folder / "model"), *_FLAGS]))
    other = next(mode for mode in _MODES if mode != killed)
    env = _environment(smg, folder) | mooncake_stand_in.install(folder / "plugins")
    with Shell(folder, env) as shell:
        shell.types(begin)
        shell.types(load)
        wait_for(lambda: len(_asked(folder)) >= 60, "60 answers")
        shell.types(f"date +%s.%N > killed.txt; kill -9 ${killed}")
        num_before = len(_asked(folder))
        wait_for(lambda: len(_asked(folder)) >= num_before + 30, "30 ends of requests")
        shell.types(f"kill -0 ${other}; {killed}; {killed}=$!; ready ${killed}_port/health")
        back_s = time.time()

        def num_since() -> int:
            return sum(each.is_whole for each in _asked(folder) if each.began_s > back_s)

        again_s = wait_for(lambda: num_since() >= 30, "30 answers after the return")
        shell.types(f"kill -0 ${other}")
        shell.types(end)
    found = _asked(folder)
    told = {
        each.number: reason((folder / "answers" / f"{each.number}").read_text(errors="replace"))
        for each in found
        if not each.is_whole
    }
    early = [
        each.number for each in found if each.number in told and each.began_s < _killed_s(folder)
    ]
    print(
        f"{len(found)} requests; lost were {len(early)} that had come when the {killed} server "
        f"was killed, and {len(told) - len(early)} after it; 30 answers came {again_s:.0f} s "
        f"after its return"
    )
    for what, number in Counter(told.values()).most_common():
        print(number, what or "were told nothing", flush=True)
    return int("" in told.values())


def measure(smg: Path, folder: Path) -> int:
    """Follow the example, print the findings, and return the exit code."""
    serve, route, load, look, kill, restart, end = _typed(folder)

    def metrics(url: str) -> str:
        return requests.get(f"{url}/metrics", timeout=60).text

    with Shell(folder, _environment(smg, folder)) as shell:
        print("serve", shell.types(serve), flush=True)
        print("route", shell.types(route), flush=True)
        shell.types(load)
        wait_for(lambda: len(_asked(folder)) >= 60, "60 answers of two servers")
        both = [num_answered(metrics(url)) for url in (_FIRST, _SECOND)]
        wait_for(lambda: gauge(metrics(_FIRST)) > 0, f"{_GAUGE} above 0")
        print(shell.types(look), flush=True)
        shell.types(kill)
        num_before = len(_asked(folder))
        wait_for(lambda: len(_asked(folder)) >= num_before + 60, "60 answers of one server")
        print("restart", shell.types(restart), flush=True)
        back_s = wait_for(lambda: num_answered(metrics(_SECOND)) >= 30, "30 answers of the other")
        num_again = num_answered(metrics(_SECOND))
        print(shell.types(end), flush=True)
    found = _asked(folder)
    lost = [each for each in found if not each.is_whole]
    late = unexplained(found, _killed_s(folder))
    print(
        f"{len(found)} requests; {both[0]} and {both[1]} answered by the two before the kill, "
        f"{num_again} by the second within {back_s:.0f} s of its return; "
        f"{len(lost)} lost, {len(late)} of them after the kill ({late[:10]})"
    )
    doubled = [number for number, times in Counter(e.number for e in found).items() if times > 1]
    return int(bool(late or doubled) or min(both) == 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smg", type=Path, required=True, metavar="PATH", help="smg's program")
    parser.add_argument("--apart", choices=_MODES, help="which of both is killed")
    args = parser.parse_args(argv)
    smg = args.smg.absolute()
    # No server must outlive this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    with tempfile.TemporaryDirectory(prefix="two-servers-") as folder:
        try:
            if args.apart:
                return measure_apart(smg, Path(folder), args.apart)
            return measure(smg, Path(folder))
        except (NotFollowedError, OSError, ValueError) as error:
            print(f"two_servers: {error}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"{log.name}:", log.read_text(errors="replace")[-1500:], file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
