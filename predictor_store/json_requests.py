"""POST /predict: a prompt's length distribution for whoever speaks HTTP, a router or gateway."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NoReturn

from predictor_store import protocol
from predictor_store.asked import Asked
from predictor_store.features import excerpt
from sage_sched.distribution import LengthDistribution

PATH = "/predict"
_MAX_BODY_BYTES = 1 << 20
_MAX_DISCARDED_BYTES = 1 << 24
_MAX_NAME_CHARS = 1_000
_MAX_QUANTILES = 100
_MAX_TOKENS = 2**31
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# Connections at a time, a thread each.
_MAX_CONNECTIONS = 64
# Of one that says nothing more.
_IDLE_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_REFUSALS = {
    "token": HTTPStatus.UNAUTHORIZED,
    "model": HTTPStatus.NOT_FOUND,
}


class RequestError(Exception):
    """What is wrong, for the client."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class JsonRequests:
    """Serves connections in threads of their own. Each prompt is asked for as a client of the
    worker would, over the listener's own address."""

    def __init__(self, listener: socket.socket) -> None:
        self.family = listener.family
        self.address = listener.getsockname()
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def take(self, connected: socket.socket) -> None:
        """Never blocks, and closes it in the end."""
        if not self._room.acquire(blocking=False):
            connected.close()
            return
        threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), connected:
                connected.settimeout(_IDLE_SECONDS)
                _Handler(connected, ("", 0), self)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def ask(self, asked: dict[str, Any], token: str) -> LengthDistribution:
        """asked: as _checked has it. Raises RequestError."""
        try:
            with socket.socket(self.family) as connected:
                connected.settimeout(_ANSWER_SECONDS)
                connected.connect(self.address)
                hello = protocol.hello(asked["model"], token, only_asks=True)
                question = {
                    "predict": 0,
                    "text": excerpt(asked["prompt"]),
                    "scope": asked["lora"],
                    "asked": asked["asked"],
                }
                connected.sendall(protocol.encode(hello) + protocol.encode(question))
                return _answer(connected)
        except OSError as error:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, f"no prediction: {error}") from error


def _answer(connected: socket.socket) -> LengthDistribution:
    lines = protocol.LineReader()
    while piece := connected.recv(1 << 16):
        for message in lines.feed(piece):
            match message:
                case {"refused": str(why), "because": str(because)}:
                    status = _REFUSALS.get(because, HTTPStatus.SERVICE_UNAVAILABLE)
                    raise RequestError(status, why)
                case {"predicted": 0, "distribution": encoded}:
                    found = protocol.decode_distribution(encoded)
                    if found is None:
                        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is known yet")
                    return found
    raise ConnectionResetError("the service ends")


class _Handler(BaseHTTPRequestHandler):
    server: JsonRequests  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    server_version = "sage-sched"
    sys_version = ""

    def do_POST(self) -> None:
        try:
            if self.path != PATH:
                raise RequestError(HTTPStatus.NOT_FOUND, f"there is POST {PATH} alone")
            self._reply(HTTPStatus.OK, self._predict(_checked(self._body())))
        except RequestError as error:
            self.close_connection = True  # some of the body may be unread
            self._reply(error.status, {"error": str(error)})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> object:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 10:
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing, or no size")
        if int(length) > _MAX_BODY_BYTES:
            self._discard(min(int(length), _MAX_DISCARDED_BYTES))
            most = f"the body may have {_MAX_BODY_BYTES} bytes"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)
        body = self.rfile.read(int(length))
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error

    def _discard(self, num_bytes: int) -> None:
        # Who is still sending reads no answer.
        while num_bytes > 0 and (piece := self.rfile.read1(min(num_bytes, 1 << 16))):
            num_bytes -= len(piece)

    def _predict(self, asked: dict[str, Any]) -> dict[str, Any]:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        found = self.server.ask(asked, token)
        if asked["max_tokens"] is not None:
            found = found.capped(asked["max_tokens"])
        return {
            "model": asked["model"],
            "source": found.source,
            "effective_samples": found.effective_samples,
            "mean": found.mean(),
            "quantiles": {f"{q:g}": found.quantile(q) for q in asked["quantiles"]},
            "lengths": found.lengths.tolist(),
            "probabilities": found.weights.tolist(),
        }

    def _reply(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode("ascii") + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _checked(body: object) -> dict[str, Any]:
    """The fields of a request, all of them. Raises RequestError."""
    if not isinstance(body, dict):
        _bad("the body is no JSON object")
    left_out: dict[str, Any] = {"lora": "", "asked": {}, "max_tokens": None}
    left_out["quantiles"] = list(_QUANTILES)
    asked = {**left_out, **body}
    allowed = ("model", "prompt", *left_out)
    for name in asked:
        if name not in allowed:
            _bad(f"unknown field {name[:100]!r}, allowed: {', '.join(allowed)}")
    for name in ("model", "prompt", "lora"):
        if not isinstance(asked.get(name), str):
            _bad(f"{name} must be a string")
    for name in ("model", "lora"):
        if len(asked[name]) > _MAX_NAME_CHARS:
            _bad(f"{name} may have {_MAX_NAME_CHARS} characters")
    if not isinstance(asked["asked"], dict):
        _bad("asked must be an object")
    try:
        Asked.from_fields(asked["asked"])
    except ValueError as error:
        _bad(f"asked is {error}")
    cap = asked["max_tokens"]
    if cap is not None and not (type(cap) is int and 1 <= cap < _MAX_TOKENS):
        _bad("max_tokens must be a whole number of at least 1")
    quantiles = asked["quantiles"]
    if not isinstance(quantiles, list) or not all(map(_is_share, quantiles)):
        _bad("quantiles must be a list of numbers from 0 to 1")
    if len(quantiles) > _MAX_QUANTILES:
        _bad(f"quantiles may be {_MAX_QUANTILES}")
    return asked


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _bad(message: str) -> NoReturn:
    raise RequestError(HTTPStatus.BAD_REQUEST, message)
