"""POST /predict: a prompt's length distribution for whoever speaks HTTP, a router or gateway."""

from __future__ import annotations

import json
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import h11

from predictor_store.predict.features import excerpt
from predictor_store.service import protocol
from predictor_store.service.connection import Connection
from predictor_store.service.json_question import RequestError, json_question
from predictor_store.service.message_lines import is_same
from predictor_store.service.worker import Worker
from sage_sched.distribution import LengthDistribution

PATH = "/predict"
_MAX_BODY_BYTES = 1 << 20
# Of requests that come before the last one is answered.
_MAX_AHEAD_BYTES = 1 << 16
# To a request that is complete.
_ANSWER_SECONDS = 10.0
# From an answer to the end of the next request.
_NEXT_SECONDS = 60.0
_REFUSALS = {
    "token": HTTPStatus.UNAUTHORIZED,
    "model": HTTPStatus.NOT_FOUND,
}


class JsonRequests:
    """Of one connection, one at a time. Each is a client of the worker, by the same number, as each
    names its own model."""

    def __init__(self, number: int, connection: Connection, worker: Worker, token: str) -> None:
        """token: that each has to say; "": none."""
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
        """Raises OSError where the other side is gone, ValueError where it sends what has no
        end."""
        self._http.receive_data(piece)
        if self._asked is None:
            self._go_on()
        elif len(self._http.trailing_data[0]) > _MAX_AHEAD_BYTES:
            raise ValueError("it sends on and on before it is answered")

    def told(self, message: dict[str, Any]) -> None:
        """By the worker. Raises OSError where the other side is gone, or hung."""
        asked = self._asked
        if asked is None:
            return
        match message:
            case {"refused": str(why), "because": str(because)}:
                status = _REFUSALS.get(because, HTTPStatus.SERVICE_UNAVAILABLE)
                self._refuse(RequestError(status, why))
            case {"ready": _}:
                question = {
                    "predict": 0,
                    "text": excerpt(asked["prompt"]),
                    "scope": asked["lora"],
                    "asked": asked["asked"],
                }
                self._worker.receive(self._number, question)
            case {"predicted": 0, "distribution": None}:
                self._refuse(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is known yet"))
            case {"predicted": 0, "distribution": encoded}:
                self._answer(asked, LengthDistribution.from_fields(encoded))

    def time_is_up(self) -> None:
        """Raises OSError where the other side is gone."""
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
                        self._check_size(len(self._body))
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
        """All that can be refused before the body is read."""
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
        self._check_size(int(headers.get(b"content-length", b"0")))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > _MAX_BODY_BYTES:
            most = f"the body may have {_MAX_BODY_BYTES} bytes"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)

    def _ask(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._connection.allow(_ANSWER_SECONDS)
        self._worker.connect(self._number)
        self._worker.receive(self._number, protocol.hello(asked["model"], only_asks=True))

    def _answer(self, asked: dict[str, Any], found: LengthDistribution) -> None:
        if asked["max_tokens"] is not None:
            found = found.capped(asked["max_tokens"])
        body = {
            "model": asked["model"],
            "source": found.source,
            "effective_samples": found.effective_samples,
            "mean": found.mean(),
            "quantiles": {f"{q:g}": found.quantile(q) for q in asked["quantiles"]},
            "lengths": found.lengths.tolist(),
            "probabilities": found.weights.tolist(),
        }
        self._asked = None
        self._worker.disconnect(self._number)
        self._connection.allow(_NEXT_SECONDS)
        self._reply(HTTPStatus.OK, body, [])
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
            self._go_on()
        else:
            self._connection.end()

    def _refuse(self, error: RequestError) -> None:
        self._asked = None
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._reply(error.status, {"error": str(error)}, [("Connection", "close")])
        self._connection.end()

    def _reply(self, status: int, body: dict[str, Any], headers: list[tuple[str, str]]) -> None:
        content = json.dumps(body).encode("ascii") + b"\n"
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(content))),
            *headers,
        ]
        parts = [h11.Response(status_code=status, headers=headers), h11.Data(data=content)]
        if self._method == b"HEAD":
            del parts[1]
        sent = [self._http.send(part) for part in (*parts, h11.EndOfMessage())]
        self._connection.send(b"".join(filter(None, sent)))
