"""sage-sched predictor serve: one predictor for many servers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
from dataclasses import replace

from predictor_store.config_file import read_config
from predictor_store.service import sockets
from predictor_store.service.server import Server
from predictor_store.service.sockets import PredictorError, default_address, token_of
from predictor_store.service.worker import Worker
from predictor_store.store.store import folder_of
from sage_sched.address import ALLOWED, Address


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves until Ctrl-C or SIGTERM. Servers use it if their settings name it: [predictor] "
        "service = ADDRESS. Each model has its own history, in its own folder of the store."
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help=f"{ALLOWED} (then with a token, from predictor.service_token_file or the environment "
        f"variable {sockets.TOKEN_VARIABLE}); default: predictor.service of the settings, or "
        "sage-sched/predictor.socket in the user's cache",
    )
    parser.add_argument(
        "--sage-config", metavar="FILE", help="settings, of which [store] and [predictor] count"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it. Raises UserError if it cannot serve."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    config = read_config(args.sage_config)
    if args.listen is not None:
        config = replace(config, predictor=replace(config.predictor, service=args.listen))
    folder, where = folder_of(config.store), config.predictor.service
    at = Address.parse(where) if where else default_address()
    token = token_of(config.predictor) if at.is_tcp else ""
    if at.is_tcp and not token:
        raise PredictorError(
            f"a service on TCP needs a token: name a file with one "
            f"(predictor.service_token_file), or set {sockets.TOKEN_VARIABLE}"
        )
    listener = sockets.listen(at)
    with contextlib.closing(Worker(config, by_model=True)) as worker:
        server = Server(worker, listener, token)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        print(f"serving on {at}, store {folder}", flush=True)
        server.run()
    return 0
