"""A prefill server and a decode server on one host, behind a balancer."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Generic, Self, TypeVar

import requests

from bench.engines.server.server import Server

_BACKEND = ("--disaggregation-transfer-backend", "mooncake_tcp")
_LOCAL = "127.0.0.1"
# SGLang's other backup pins host memory through CUDA.
_CPU_BACKUP = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
_NUM_ROOMS = 1 << 62
_TIMEOUT_S = 600.0
_Server = TypeVar("_Server", bound=Server)


class Pair(Generic[_Server]):
    """Both servers, within a `with` block.

    url: of the balancer. As SGLang's routers do, it sends each request to both servers and returns
        the decode server's answer.
    """

    def __init__(self, start: Callable[[str, Sequence[str]], _Server]) -> None:
        """start: makes a server of this mode, with these flags and any others that it needs."""
        with socket.socket() as probe:
            probe.bind((_LOCAL, 0))
            self._bootstrap_port: int = probe.getsockname()[1]
        port = ["--disaggregation-bootstrap-port", str(self._bootstrap_port)]
        self.prefill = start("prefill", ["--disaggregation-mode", "prefill", *_BACKEND, *port])
        self.decode = start("decode", ["--disaggregation-mode", "decode", *_BACKEND, *_CPU_BACKUP])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(2))
            both = [pool.submit(stack.enter_context, s) for s in (self.prefill, self.decode)]
            for started in both:
                started.result()
            self._balancer = _Balancer((_LOCAL, 0), _handler(self))
            stack.callback(self._balancer.server_close)
            stack.callback(self._balancer.shutdown)
            Thread(target=self._balancer.serve_forever, daemon=True).start()
            self.url = f"http://{_LOCAL}:{self._balancer.server_port}"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def log(self) -> Path:
        """The log of the decode server, which answers."""
        return self.decode.log

    def log_tail(self) -> str:
        """Return the ends of both logs."""
        return f"{self.prefill.log_tail()}\n{self.decode.log_tail()}"

    def in_a_room(self, body: bytes) -> bytes:
        """Return the body that both servers get for a request."""
        room = random.randrange(_NUM_ROOMS)
        where = {"bootstrap_host": _LOCAL, "bootstrap_port": self._bootstrap_port}
        return json.dumps({**json.loads(body), **where, "bootstrap_room": room}).encode()


class _Balancer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def _handler(pair: Pair[_Server]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            infos = [
                requests.get(f"{server.url}{self.path}", timeout=_TIMEOUT_S).json()
                for server in (pair.decode, pair.prefill)
            ]
            # Show them as replicas of one server.
            states = [state for info in infos for state in info["internal_states"]]
            self.send_response(HTTPStatus.OK)
            self.end_headers()
            self.wfile.write(json.dumps({**infos[0], "internal_states": states}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if body:
                body = pair.in_a_room(body)
            headers = {name: self.headers[name] for name in self.headers if name != "Host"}
            headers["Content-Length"] = str(len(body))

            def prefill() -> None:
                url = f"{pair.prefill.url}{self.path}"
                with suppress(requests.RequestException):  # the decode server reports it
                    requests.post(url, data=body, headers=headers, timeout=_TIMEOUT_S)

            Thread(target=prefill, daemon=True).start()
            url = f"{pair.decode.url}{self.path}"
            try:
                answer = requests.post(
                    url, data=body, headers=headers, timeout=_TIMEOUT_S, stream=True
                )
            except requests.RequestException as error:
                self.send_error(HTTPStatus.BAD_GATEWAY, explain=str(error))
                return
            with answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                self.end_headers()
                for part in answer.iter_content(None):
                    self.wfile.write(part)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
