"""The server of the run at hand: a fresh one, or the one before, as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import Self

import psutil
import requests

from bench.engines.clock.device import Device
from bench.engines.server.policy_server import PolicyServers, scheduler_state
from bench.engines.server.server import Server, ServerError

# Loading takes seconds; on a host that is busy with other things, minutes.
_TIMEOUT_S = 600.0


class KeptServer:
    """One server at a time, for as long as a `with` block lasts.

    On a bare host every run has a server of its own. On a device clock, where it does not matter
    when a run takes place, a server stays for all the runs of its policy that follow one another,
    as starting one takes longer than many a run.
    """

    def __init__(self, servers: PolicyServers) -> None:
        self._servers = servers
        self._policy = ""
        self._server: Server | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()

    @property
    def device(self) -> Device:
        """Whose clock the servers go by. Raises ServerError if by none."""
        if self._servers.device is None:
            raise ServerError("these servers have no device clock")
        return self._servers.device

    def keeps(self, policy: str) -> bool:
        """Whether the next run of this policy needs no new server."""
        kept = self._server is not None and self._server.running() and policy == self._policy
        return kept and self._servers.device is not None

    def get(self, policy: str, name: str) -> Server:
        """A server that has nothing in its caches, and in its history no more than was warmed.

        name: of its log, if it is started now. Raises ServerError.
        """
        if self._server is not None and self.keeps(policy):
            reset(self._server)
        else:
            self.drop()
            self._server = self._servers.server(policy, name).__enter__()
            self._policy = policy
        if self._servers.device is not None:
            hurry_predictions(self._server)
        return self._server

    def drop(self) -> None:
        """End the server; harmless where there is none."""
        if self._server is not None:
            self._server.kill()
            self._server = None


def reset(server: Server) -> None:
    """Empty the caches of an idle server, and let its history begin anew. Raises ServerError."""
    try:
        requests.post(f"{server.url}/flush_cache?timeout=30", timeout=60).raise_for_status()
    except requests.RequestException as error:
        raise ServerError(f"the server's cache could not be flushed: {error}") from error
    workers = _prediction_workers(server)
    if not workers:
        return
    # What it has learnt is in its memory alone; the one that takes its place reads the store.
    num_before = _num_restarts(server)
    for worker in workers:
        worker.kill()
    deadline = time.monotonic() + _TIMEOUT_S
    while _num_restarts(server) == num_before:
        if time.monotonic() > deadline:
            raise ServerError("the server's prediction worker did not come back")
        time.sleep(0.2)


def hurry_predictions(server: Server) -> None:
    """Let predictions be made at the priority of this process, and not at the lowest: on a device
    clock, where the engine's own time is modelled, there are cores to spare for them."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    for worker in _prediction_workers(server):
        for thread in worker.threads():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


def _prediction_workers(server: Server) -> list[psutil.Process]:
    processes = psutil.Process(server.pid).children(recursive=True)
    modules = {"predictor_store.service.worker_process", "bench.engines.clock.recall"}
    return [process for process in processes if modules & set(process.cmdline())]


def _num_restarts(server: Server) -> int:
    return int(scheduler_state(server)["predictor"]["num_worker_restarts"])
