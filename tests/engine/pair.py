"""A prefill server and a decode server on one host, behind a balancer."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import requests

from tests.engine.serving import SageServer

_BACKEND = ("--disaggregation-transfer-backend", "mooncake_tcp")
_LOCAL = "127.0.0.1"
# SGLang's other backup pins host memory through CUDA.
_CPU_BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
_NUM_ROOMS = 1 << 62
_TIMEOUT_S = 600.0


class Pair:
    """Both servers, within a `with` block.

    url: of the balancer. As SGLang's routers do, it sends each request to both servers and returns
        the decode server's answer.
    """

    def __init__(self, start: Callable[[str, Sequence[str]], SageServer]) -> None:
        """start: makes a server of this mode, with these flags and any others that it needs."""
        with socket.socket() as probe:
            probe.bind((_LOCAL, 0))
            self.bootstrap_port: int = probe.getsockname()[1]
        port = ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        self.prefill = start("prefill", ["--disaggregation-mode", "prefill", *_BACKEND, *port])
        self.decode = start("decode", ["--disaggregation-mode", "decode", *_BACKEND, *_CPU_BACKUP])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.pool = stack.enter_context(ThreadPoolExecutor(64))
            [*self.pool.map(stack.enter_context, (self.prefill, self.decode))]
            balancer = stack.enter_context(_Balancer(self))
            stack.callback(balancer.shutdown)
            self.pool.submit(balancer.serve_forever)
            self.url = f"http://{_LOCAL}:{balancer.server_port}"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _Balancer(ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, pair: Pair) -> None:
        super().__init__((_LOCAL, 0), _Handler)
        self.pair = pair


class _Handler(BaseHTTPRequestHandler):
    server: _Balancer

    def do_POST(self) -> None:
        pair, text = self.server.pair, self.rfile.read(int(self.headers["Content-Length"] or 0))
        where = {"bootstrap_host": _LOCAL, "bootstrap_port": pair.bootstrap_port}
        body = {**json.loads(text), **where, "bootstrap_room": random.randrange(_NUM_ROOMS)}
        ask = partial(requests.post, json=body, timeout=_TIMEOUT_S)
        pair.pool.submit(ask, pair.prefill.url + self.path)
        try:
            answer = ask(pair.decode.url + self.path)
        except requests.RequestException:
            self.send_error(HTTPStatus.BAD_GATEWAY)
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.end_headers()
        self.wfile.write(answer.content)
