"""One client of a service that speaks HTTP: POST /predict, for a router or a gateway."""

from __future__ import annotations

import json
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NoReturn

import h11

from predictor_store.predict.asked import Asked
from predictor_store.predict.features import excerpt
from predictor_store.service.connection import Connection
from predictor_store.service.lines import is_same
from predictor_store.service.worker import Worker
from sage_sched.distribution import LengthDistribution

PATH = "/predict"
_MAX_BODY_BYTES = 1 << 20
# What a client may send before its last request is answered.
_MAX_AHEAD_BYTES = 1 << 16
# From a complete request to its answer.
_ANSWER_SECONDS = 10.0
# From an answer to the end of the next request.
_NEXT_SECONDS = 60.0
_REFUSALS = {"token": HTTPStatus.UNAUTHORIZED, "model": HTTPStatus.NOT_FOUND}

_MAX_NAME_CHARS = 1_000
_MAX_QUANTILES = 100
_MAX_TOKENS = 2**31
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class RequestError(Exception):
    """What is wrong, for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class JsonRequests:
    """Its requests, one at a time. Each is a new client of the worker, by the same number, as it
    names its own model. token: that each request has to say; "": none."""

    def __init__(self, number: int, connection: Connection, worker: Worker, token: str) -> None:
        self._number = number
        self._connection = connection
        self._worker = worker
        self._token = token
        self._http = h11.Connection(h11.SERVER)
        self._method = b""
        self._body = bytearray()
        # What the worker has not answered yet.
        self._asked: dict[str, Any] | None = None

    def hear(self, piece: bytes) -> None:
        """What it says. Raises OSError if it is gone, ValueError if it says what has no end."""
        self._http.receive_data(piece)
        if self._asked is None:
            self._go_on()
        elif len(self._http.trailing_data[0]) > _MAX_AHEAD_BYTES:
            raise ValueError("it sends on and on before it is answered")

    def told(self, message: dict[str, Any]) -> None:
        """What the worker tells it. Raises OSError if it is gone, or hung."""
        asked = self._asked
        if asked is None:
            return
        match message:
            case {"refused": str(why), "because": str(because)}:
                status = _REFUSALS.get(because, HTTPStatus.SERVICE_UNAVAILABLE)
                self._refuse(RequestError(status, why))
            case {"ready": _}:
                question = {"predict": 0, "text": excerpt(asked["prompt"]), "scope": asked["lora"]}
                self._worker.receive(self._number, {**question, "asked": asked["asked"]})
            case {"predicted": 0, "distribution": None}:
                self._refuse(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is known yet"))
            case {"predicted": 0, "distribution": encoded}:
                self._answer(asked, LengthDistribution.from_fields(encoded))

    def time_is_up(self) -> None:
        """Raises OSError if it is gone."""
        if self._asked is not None:
            said = f"no prediction within {_ANSWER_SECONDS:g} s"
            self._refuse(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, said))
        elif self._http.their_state is h11.SEND_BODY:
            self._refuse(RequestError(HTTPStatus.REQUEST_TIMEOUT, "the body does not come"))

    def _go_on(self) -> None:
        try:
            while self._asked is None and not self._connection.is_ending:
                match self._http.next_event():
                    case h11.Request() as request:
                        self._begin(request)
                    case h11.Data(data=data):
                        self._body += data
                        _check_size(len(self._body))
                    case h11.EndOfMessage():
                        self._ask(json_question(self._body))
                    case _:
                        break
            if self._http.they_are_waiting_for_100_continue and not self._connection.is_ending:
                go_on = h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[])
                self._connection.send(self._http.send(go_on) or b"")
        except h11.RemoteProtocolError as error:
            self._refuse(RequestError(error.error_status_hint, str(error)))
        except RequestError as error:
            self._refuse(error)

    def _begin(self, request: h11.Request) -> None:
        """Refuses all that can be refused before the body is read."""
        self._method = request.method
        self._body.clear()
        headers = dict(request.headers)
        scheme, _, said = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        if self._token and not (is_bearer and is_same(said.strip(), self._token)):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the token is not the service's")
        self._connection.is_known = True
        if (request.method, request.target) != (b"POST", PATH.encode("ascii")):
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is POST {PATH} alone")
        _check_size(int(headers.get(b"content-length", b"0")))

    def _ask(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._connection.allow(_ANSWER_SECONDS)
        self._worker.connect(self._number, asked["model"], only_asks=True)

    def _answer(self, asked: dict[str, Any], found: LengthDistribution) -> None:
        if asked["max_tokens"] is not None:
            found = found.capped(asked["max_tokens"])
        body = {
            "model": asked["model"],
            "source": found.source,
            "effective_samples": found.effective_samples,
            "mean": found.mean(),
            "osl": max(1, round(found.mean())),
            "quantiles": {f"{q:g}": found.quantile(q) for q in asked["quantiles"]},
            "lengths": found.lengths.tolist(),
            "probabilities": found.weights.tolist(),
        }
        self._asked = None
        self._worker.disconnect(self._number)
        self._connection.allow(_NEXT_SECONDS)
        self._reply(HTTPStatus.OK, body)
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            self._go_on()
        else:
            self._connection.end()

    def _refuse(self, error: RequestError) -> None:
        self._asked = None
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._reply(error.status, {"error": str(error)}, ("Connection", "close"))
        self._connection.end()

    def _reply(self, status: int, body: dict[str, Any], *more: tuple[str, str]) -> None:
        content = json.dumps(body).encode("ascii") + b"\n"
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
            *more,
        ]
        parts = [h11.Response(status_code=status, headers=headers), h11.Data(data=content)]
        if self._method == b"HEAD":
            del parts[1]
        sent = [self._http.send(part) for part in (*parts, h11.EndOfMessage())]
        self._connection.send(b"".join(filter(None, sent)))


def json_question(content: bytes | bytearray) -> dict[str, Any]:
    """All fields of a request's body, those left out too. Raises RequestError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from error
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
        if name != "prompt" and len(asked[name]) > _MAX_NAME_CHARS:
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


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MAX_BODY_BYTES:
        most = f"the body may have {_MAX_BODY_BYTES} bytes"
        raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _bad(message: str) -> NoReturn:
    raise RequestError(HTTPStatus.BAD_REQUEST, message)
