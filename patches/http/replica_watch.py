"""Notices in the data-parallel controller's process that a replica has died.

SGLang 0.5.23 does not: it watches the process that starts the schedulers, not the schedulers. After
a death nobody reads the dead one's socket, so the first message to it, an abort for instance, would
block the controller for ever, and with it all other replicas.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Sequence
from multiprocessing import Process, connection
from typing import Any

import psutil
import zmq
from sglang.srt.managers.io_struct import ActiveRanksOutput, sock_send
from sglang.srt.utils.network import get_zmq_socket

from patches.hook import AFTER, Hooks

logger = logging.getLogger(__name__)

_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
# What a scheduler calls its process (configure_scheduler_process, managers/scheduler.py).
_TITLE = re.compile(r"sglang::scheduler.*_DP(\d+)")


# For servers whose replicas our router picks.
controller_hooks = Hooks()


@controller_hooks.at(f"{_CONTROLLER}.init_dispatcher", AFTER)
def _after_init_dispatcher(result: None, self: Any) -> None:
    # The schedulers are ready by now.
    replicas = by_rank(self.scheduler_procs)
    if sorted(replicas) != list(range(len(self.workers))):
        logger.error("replicas cannot be told apart: that one dies will go unnoticed")
        return
    # Asked here, as a socket belongs to one thread.
    ends = [str(worker.get_string(zmq.LAST_ENDPOINT)) for worker in self.workers if worker]
    threading.Thread(target=_watch, args=(self, replicas, ends), daemon=True).start()


def by_rank(processes: Sequence[Process]) -> dict[int, list[Process]]:
    """The schedulers of each replica, as far as their process titles tell."""
    found: dict[int, list[Process]] = {}
    for process in processes:
        title = _TITLE.match(" ".join(psutil.Process(process.pid).cmdline()))
        if title is not None:
            found.setdefault(int(title[1]), []).append(process)
    return found


def _watch(controller: Any, replicas: dict[int, list[Process]], ends: list[str]) -> None:
    """Runs until all have died. The server ends with the last one."""
    end = controller.port_args.tokenizer_ipc_name
    tell = get_zmq_socket(controller.context, zmq.PUSH, end, False)
    while replicas:
        watched = {process.sentinel for of in replicas.values() for process in of}
        ended = set(connection.wait(watched))
        dead = [rank for rank, of in replicas.items() if ended & {each.sentinel for each in of}]
        for rank in dead:
            logger.error("replica %d has died", rank)
            # The rest of it would wait for the dead in a collective until a watchdog ended the
            # server.
            for process in replicas.pop(rank):
                process.kill()
            taken = (controller.context, ends[rank])
            threading.Thread(target=_drain, args=taken, daemon=True).start()
            controller.status[rank] = False
        if not replicas:
            logger.error("no replica is left")
            os._exit(1)  # the process that started this one notices, and ends the server
        controller._refresh_active_workers()
        sock_send(tell, ActiveRanksOutput(status=list(controller.status)))


def _drain(context: zmq.Context[Any], end: str) -> None:
    """Take what is sent to the dead, so that no sender blocks."""
    taken = get_zmq_socket(context, zmq.PULL, end, False)
    while True:
        taken.recv()
