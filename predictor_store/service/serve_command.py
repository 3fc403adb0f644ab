"""Implements `sage-sched predictor serve`, which serves one predictor to many servers."""

from __future__ import annotations

import argparse
import contextlib
import logging
import resource
import signal
import socket
from dataclasses import replace
from functools import partial

from predictor_store.config_file import read_config
from predictor_store.service import endpoint
from predictor_store.service.endpoint import PredictorError, default_address, token_of
from predictor_store.service.http import HttpFront
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.settings_command import add_listing
from predictor_store.store.store import folder_of
from sage_sched.app.address import ALLOWED, Address

_TOKEN = f"predictor.service_token_file or the environment variable {endpoint.TOKEN_VARIABLE}"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves until Ctrl-C or SIGTERM. Servers use it if their settings name it: [predictor] "
        "service = ADDRESS. Each model has its own history, in its own folder of the store."
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help=f"the address for servers: {ALLOWED} (then with a token, from {_TOKEN}); default: "
        "predictor.service of the settings, or sage-sched/predictor.socket in the user's cache",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        type=Address.parse,
        help=f"also serve routers and monitoring: POST /predict, /health and /metrics, with the "
        f"token from {_TOKEN}",
    )
    parser.add_argument(
        "--sage-config", metavar="FILE", help="settings; only [store] and [predictor] are used"
    )
    add_listing(parser, "store", "predictor")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it. Raises UserError if it cannot serve."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    config = read_config(args.sage_config)
    if args.listen is not None:
        config = replace(config, predictor=replace(config.predictor, service=args.listen))
    folder, where = folder_of(config.store), config.predictor.service
    at = Address.parse(where) if where else default_address()
    token = token_of(config.predictor) if at.is_tcp or args.http else ""
    if (at.is_tcp or args.http) and not token:
        raise PredictorError(f"a service on TCP needs a token: set {_TOKEN}")
    # Unknown clients may take descriptors for some seconds each, so raise their number to the
    # limit.
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    router = endpoint.listen(at, token)
    with contextlib.closing(Worker(config, by_model=True)) as worker:
        beside = None
        if args.http is not None:
            beside = partial(HttpFront(worker, token).serve, _http_listener(args.http))
        server = Server(worker, router, beside=beside)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        print(f"serving on {at}, store {folder}", flush=True)
        server.run()
    return 0


def _http_listener(at: Address) -> socket.socket:
    if not at.is_tcp:
        raise PredictorError(f"--http takes host:port, not {at}")
    try:
        family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
        return socket.create_server((at.host, at.port), family=family, backlog=1024)
    except OSError as error:
        raise PredictorError(f"cannot listen on {at}: {error}") from error
