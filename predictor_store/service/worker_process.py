"""The process of a prediction worker.

A server's own is run by predictor_store.service.link as `python -m
predictor_store.service.worker_process FD
CONFIG`: a connected stream socket, and the sections store and predictor as a JSON object. One that
has a predictor.service listens there as well, for the HTTP processes of its server. A service that
servers share is run by `sage-sched predictor serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from predictor_store.service import protocol, service_socket
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.store_file import StoreError
from sage_sched.address import Address
from sage_sched.config import SageConfig

_NICENESS = 19


def main() -> None:
    # Ctrl-C goes to the whole process group; the server hangs up when it is through.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connected = socket.socket(fileno=int(sys.argv[1]))
    config = SageConfig.parse(json.loads(sys.argv[2]))
    try:
        worker = Worker(config)
    except StoreError as error:
        refused = {"refused": str(error), "because": "store"}
        connected.sendall(protocol.encode(refused))
        return
    if config.predictor.encoder == "minilm":
        # From here on the engine goes first: on a host whose cores are all busy, the transformer
        # beside it at equal rank costs it a third of its throughput (`sage-sched bench`, 2 cores),
        # and gains nothing. Not before: the server waits for this process to be ready. Means of
        # token vectors take a millisecond a request with all the rest.
        os.nice(_NICENESS)
    if not config.predictor.service:
        _run(Server(worker), worker, connected)
        return
    address = Address.parse(config.predictor.service)
    listener = service_socket.listen(address)
    try:
        _run(Server(worker, listener), worker, connected)
    finally:
        service_socket.remove(address, listener)
        # It was made for this socket alone, by predictor_store.service.shared_worker.
        with contextlib.suppress(OSError):
            Path(address.path).parent.rmdir()


def _run(server: Server, worker: Worker, connected: socket.socket) -> None:
    server.add(connected)
    try:
        server.run()
    finally:
        server.close()
        worker.close()


if __name__ == "__main__":
    main()
