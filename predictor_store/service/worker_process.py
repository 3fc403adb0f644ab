"""The process of a server's own prediction worker.

`python -m predictor_store.service.worker_process FD CONFIG`, run by predictor_store.service.link:
FD is a connected stream socket, CONFIG the sections store and predictor as a JSON object. If
predictor.service is set, the worker listens there too, for the HTTP processes of its server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

from predictor_store.service import protocol, sockets
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.file import StoreError
from sage_sched.address import Address
from sage_sched.config import SageConfig

_NICENESS = 19


def main() -> None:
    # Ctrl-C goes to the whole process group. The server answers what it has begun; then it hangs
    # up, or kills its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connected = socket.socket(fileno=int(sys.argv[1]))
    config = SageConfig.parse(json.loads(sys.argv[2]))
    try:
        worker = Worker(config)
    except StoreError as error:
        connected.sendall(protocol.encode(protocol.refusal(str(error), "store")))
        return
    if config.predictor.encoder == "minilm":
        # From here on the engine goes first. With all cores busy, the transformer at equal priority
        # costs the engine a third of its throughput (`sage-sched bench`, 2 cores) and gains
        # nothing. Means of token vectors take a millisecond a request, and stay at equal priority.
        os.nice(_NICENESS)
    at = config.predictor.service
    with contextlib.closing(worker):
        listener = sockets.listen(Address.parse(at)) if at else None
        server = Server(worker, listener, own=connected)
        signal.signal(signal.SIGINT, lambda *_: server.hurry())
        server.run()
        if at:  # a SharedWorker made the folder for this socket alone
            with contextlib.suppress(OSError):
                Path(at).parent.rmdir()


if __name__ == "__main__":
    main()
