"""A data-parallel controller that notices when one of its replicas has died.

SGLang 0.5.23 does not: it watches the process that starts the schedulers, not these. Their socket
then has nobody at its other end, and the first message to the dead one, an abort for instance,
blocks the controller for ever, and with it every other replica.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from multiprocessing import Process, connection
from typing import Any, Protocol

import psutil
import zmq
from sglang.srt.managers.io_struct import ActiveRanksOutput, sock_send
from sglang.srt.utils.network import get_zmq_socket

from patches.hook import AFTER, Hook

logger = logging.getLogger(__name__)

_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
# What a scheduler calls its process (configure_scheduler_process, managers/scheduler.py).
_TITLE = re.compile(r"sglang::scheduler.*_DP(\d+)")


class Controller(Protocol):
    """DataParallelController, managers/data_parallel_controller.py"""

    context: zmq.Context[Any]
    port_args: Any
    workers: Sequence[zmq.Socket[Any] | None]
    scheduler_procs: Sequence[Process]
    status: list[bool]

    def _refresh_active_workers(self) -> None: ...


def controller_hooks() -> list[Hook]:
    """Those of the controller's process, where our router picks the replicas."""
    return [Hook(f"{_CONTROLLER}.init_dispatcher", AFTER, _after_init_dispatcher, ())]


def _after_init_dispatcher(result: None, self: Controller) -> None:
    # The schedulers are ready by now.
    replicas = by_rank(self.scheduler_procs)
    if sorted(replicas) != list(range(len(self.workers))):
        logger.error("replicas cannot be told apart: that one dies will go unnoticed")
        return
    # Here, as sockets are for one thread.
    ends = [str(worker.get_string(zmq.LAST_ENDPOINT)) for worker in self.workers if worker]
    watch = threading.Thread(target=_watch, args=(self, replicas, ends), daemon=True)
    watch.start()


def by_rank(processes: Sequence[Process]) -> dict[int, list[Process]]:
    """Schedulers by the replica that they are of, as far as their titles say so."""
    found: dict[int, list[Process]] = {}
    for process in processes:
        title = _TITLE.match(" ".join(psutil.Process(process.pid).cmdline()))
        if title is not None:
            found.setdefault(int(title[1]), []).append(process)
    return found


def _watch(controller: Controller, replicas: dict[int, list[Process]], ends: list[str]) -> None:
    """Until all have died; the server ends with the last one."""
    tell = get_zmq_socket(
        controller.context, zmq.PUSH, controller.port_args.tokenizer_ipc_name, False
    )
    while replicas:
        watched = {process.sentinel for of in replicas.values() for process in of}
        ended = set(connection.wait(watched))
        dead = [rank for rank, of in replicas.items() if ended & {each.sentinel for each in of}]
        for rank in dead:
            logger.error("replica %d has died", rank)
            # What is left of it would wait for the dead in a collective, and be ended for that,
            # with the server.
            for process in replicas.pop(rank):
                process.kill()
            threading.Thread(
                target=_drain, args=(controller.context, ends[rank]), daemon=True
            ).start()
            controller.status[rank] = False
        if not replicas:
            logger.error("no replica is left")
            os._exit(1)  # which the process that started this one notices, and ends the server
        controller._refresh_active_workers()
        sock_send(tell, ActiveRanksOutput(status=list(controller.status)))


def _drain(context: zmq.Context[Any], end: str) -> None:
    """Take away what is sent to the dead, so that nobody waits to send it."""
    taken = get_zmq_socket(context, zmq.PULL, end, False)
    while True:
        taken.recv()
