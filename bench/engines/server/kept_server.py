"""Keeps one server per policy, and resets it between runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import requests
from tqdm import tqdm

from bench.engines.clock.device import MAX_LATE_SHARE, DeviceUse
from bench.engines.server.client import Answer
from bench.engines.server.policy_server import (
    PolicyServers,
    counters_between,
    internal_state,
    scheduler_state,
)
from bench.engines.server.server import Server, ServerError
from predictor_store.service import own_process

# Loading takes seconds; minutes on a busy host.
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to requests.

    counters: of our policies.
    use: of a device clock.
    late: why the host was too late for that clock, so that the run must not be counted, or "".
    """

    answers: list[Answer]
    counters: dict[str, Any]
    use: DeviceUse | None
    late: str


class KeptServer:
    """A policy's server, until it is closed.

    On a bare host every run has a server of its own. On a device clock the time of a run does not
    matter, so the server stays: starting one takes longer than many runs.
    """

    def __init__(self, servers: PolicyServers, policy: str, num_tries: int = 3) -> None:
        """num_tries: the most times that requests are sent, if the host is late."""
        self.servers = servers
        self._policy, self._num_tries = policy, num_tries
        self._server: Server | None = None

    def run(
        self,
        name: str,
        send: Callable[[str], list[Answer]],
        prepare: Callable[[str], None] = lambda url: None,
    ) -> Run:
        """Send requests to the server. If the host delays its device clock, send them again,
        because it may have been busy for a while. Raises ServerError.

        name: the name of the log file.
        send, prepare: get the server's URL. Requests of prepare come first and do not count.
        """
        device = self.servers.device
        for _ in range(self._num_tries):
            server = self._get(name)
            prepare(server.url)
            before = internal_state(server)
            answers = send(server.url)
            after = internal_state(server)
            counters = counters_between(before, after)
            use, late = None, ""
            if device is not None:
                use = DeviceUse.between(before, after, device.speed)
                late = use.problem() or _late_predictions(counters, len(answers))
            if not late:
                break
            tqdm.write(f"{name}: {late}", file=sys.stderr)
        return Run(answers, counters, use, late)

    def _get(self, name: str) -> Server:
        """Return a server with empty caches, whose history has only the warmed records. Raises
        ServerError.

        name: the name of its log file, if it is started now.
        """
        stays = self.servers.device is not None
        if self._server is not None and self._server.running() and stays:
            reset(self._server)
        else:
            self.close()
            self._server = self.servers.server(self._policy, name).__enter__()
        if stays:
            hurry_predictions(self._server)
        return self._server

    def close(self) -> None:
        """End the server, if there is one."""
        if self._server is not None:
            self._server.kill()
            self._server = None


def _late_predictions(counters: Mapping[str, Any], num_requests: int) -> str:
    num_late = counters.get("predictor", {}).get("num_deadline_misses", 0)
    if num_late <= MAX_LATE_SHARE * num_requests:
        return ""
    return (
        f"{num_late} of {num_requests} requests went on without a prediction, because it was not "
        "ready: the host is overloaded, or the clock is too fast"
    )


def reset(server: Server) -> None:
    """Empty the caches of an idle server, and reset its history. Raises ServerError."""
    try:
        requests.post(f"{server.url}/flush_cache?timeout=30", timeout=60).raise_for_status()
    except requests.RequestException as error:
        raise ServerError(f"the server's cache could not be flushed: {error}") from error
    workers = _prediction_workers(server)
    if not workers:
        return
    # The worker has learned in memory only. The next one reads the store.
    num_before = _num_restarts(server)
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _TIMEOUT_S
    while _num_restarts(server) == num_before:
        if time.monotonic() > deadline:
            raise ServerError("the server's prediction worker did not come back")
        time.sleep(0.2)


def hurry_predictions(server: Server) -> None:
    """Make the prediction workers run at the priority of this process, not at the lowest. On a
    device clock the engine's own time is modelled, so there are cores to spare."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    for worker in _prediction_workers(server):
        for thread in worker.threads():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


def _prediction_workers(server: Server) -> list[psutil.Process]:
    processes = psutil.Process(server.pid).children(recursive=True)
    return [process for process in processes if own_process.WORKER_MODULE in process.cmdline()]


def _num_restarts(server: Server) -> int:
    return int(scheduler_state(server)["predictor"]["num_worker_restarts"])
