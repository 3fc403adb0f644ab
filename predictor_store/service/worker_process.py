"""Runs the process of a server's own prediction worker.

predictor_store.service.own_process runs
`python -m predictor_store.service.worker_process PID CONFIG`. The worker ends with its parent, the
process PID. CONFIG is a JSON object with the sections store and predictor. The worker listens on
predictor.service. Its first line of output says that it is ready, or why not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from predictor_store.service.endpoint import listen
from predictor_store.service.own_process import READY
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.file import StoreError
from sage_sched.app.address import Address
from sage_sched.app.config import SageConfig

_NICENESS = 19


def main() -> None:
    # Ctrl-C goes to the whole process group. The server finishes its requests, and then kills its
    # processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = SageConfig.parse(json.loads(sys.argv[2]))
    try:
        worker = Worker(config)
    except StoreError as error:
        print(" ".join(str(error).split()), flush=True)
        return
    if config.predictor.encoder == "minilm":
        # From here on the engine has priority. With all cores busy, the transformer at equal
        # priority costs the engine a third of its throughput (`sage-sched bench run`, 2 cores) and
        # gains nothing. The static encoder takes a millisecond per request, and stays at equal
        # priority.
        os.nice(_NICENESS)
    path = config.predictor.service
    with contextlib.closing(worker):
        server = Server(worker, listen(Address(path=path)), parent=int(sys.argv[1]))
        signal.signal(signal.SIGINT, lambda *_: server.hurry())
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        print(READY, end="", flush=True)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the server stops reading the pipe
        server.run()
        with contextlib.suppress(OSError):
            Path(path).parent.rmdir()


if __name__ == "__main__":
    main()
