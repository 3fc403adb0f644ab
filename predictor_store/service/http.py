"""A client of a service that speaks HTTP: POST /predict, for a router or a gateway."""

from __future__ import annotations

import asyncio
import json
from email.utils import formatdate
from http import HTTPStatus
from typing import Annotated, Any

import h11
import msgspec

from predictor_store.predict.asked import NOTHING_ASKED, Asked
from predictor_store.predict.features import excerpt
from predictor_store.service.connection import Connection
from predictor_store.service.protocol import is_same
from predictor_store.service.worker import Worker
from sage_sched.distribution import LengthDistribution

PATH = "/predict"
_PIECE_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 20
# From a complete request to its answer.
_ANSWER_SECONDS = 10.0
# From an answer to the end of the next request.
_NEXT_SECONDS = 60.0
_REFUSALS = {"token": HTTPStatus.UNAUTHORIZED, "model": HTTPStatus.NOT_FOUND}


class RequestError(Exception):
    """What is wrong, for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_Name = Annotated[str, msgspec.Meta(max_length=1_000)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request; see docs/predictor.md."""

    model: _Name
    prompt: str
    lora: _Name = ""
    asked: Asked = NOTHING_ASKED
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    quantiles: Annotated[tuple[_Share, ...], msgspec.Meta(max_length=100)] = (
        0.1, 0.25, 0.5, 0.75, 0.9, 0.99,
    )  # fmt: skip


async def talk(connection: Connection, first: bytes, worker: Worker, token: str) -> None:
    """Answers one request after another, until the client hangs up or one is refused.

    first: what was read of it already. token: what each request must say; "": nothing. Raises
    OSError if the client is gone.
    """
    requests = _Requests(connection, worker, token)
    try:
        await requests.answer_all(first)
    except (RequestError, h11.RemoteProtocolError) as error:
        requests.refuse(error)
    except asyncio.CancelledError:
        if connection.is_late:
            requests.time_is_up()
        raise
    while await connection.reader.read(_PIECE_BYTES):
        pass  # it has yet to notice that it is told no more


class _Requests:
    """One connection's requests. Each names its own model, so for the worker each is a new client,
    by the same number."""

    def __init__(self, connection: Connection, worker: Worker, token: str) -> None:
        self._connection = connection
        self._worker = worker
        self._token = token
        self._http = h11.Connection(h11.SERVER)
        self._method = b""

    async def answer_all(self, first: bytes) -> None:
        """Raises RequestError, h11.RemoteProtocolError."""
        self._http.receive_data(first)
        while isinstance(request := await self._event(), h11.Request):
            self._check(request)
            body = bytearray()
            while isinstance(part := await self._event(), h11.Data):
                body += part.data
                _check_size(len(body))
            question = read_question(body)
            self._connection.allow(_ANSWER_SECONDS)
            content = _answer(question, await self._predicted(question))
            self._connection.allow(_NEXT_SECONDS)
            self._reply(HTTPStatus.OK, content)
            if self._http.our_state is not h11.DONE:
                self._connection.end()
                return
            self._http.start_next_cycle()

    def refuse(self, error: RequestError | h11.RemoteProtocolError) -> None:
        status = error.status if isinstance(error, RequestError) else error.error_status_hint
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._reply(status, {"error": str(error)}, ("Connection", "close"))
        self._connection.end()

    def time_is_up(self) -> None:
        if self._http.their_state is h11.SEND_BODY:
            self.refuse(RequestError(HTTPStatus.REQUEST_TIMEOUT, "the body does not come"))
        elif self._http.our_state is h11.SEND_RESPONSE:
            why = f"no prediction within {_ANSWER_SECONDS:g} s"
            self.refuse(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, why))

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[])
                self._connection.send(self._http.send(go_on) or b"")
            self._http.receive_data(await self._connection.reader.read(_PIECE_BYTES))
        return event

    def _check(self, request: h11.Request) -> None:
        """Refuses all that can be refused before the body is read."""
        self._method = request.method
        headers = dict(request.headers)
        scheme, _, said = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        if self._token and not (is_bearer and is_same(said.strip(), self._token)):
            raise RequestError(HTTPStatus.UNAUTHORIZED, "the token is not the service's")
        self._connection.is_known = True
        if (request.method, request.target) != (b"POST", PATH.encode("ascii")):
            raise RequestError(HTTPStatus.NOT_FOUND, f"there is POST {PATH} alone")
        _check_size(int(headers.get(b"content-length", b"0")))

    async def _predicted(self, question: Question) -> LengthDistribution:
        """Raises RequestError if the worker refuses, or knows nothing."""
        number, told = self._connection.number, asyncio.Queue[dict[str, Any]]()
        self._connection.tell = told.put_nowait
        match self._worker.connect(number, question.model, only_asks=True):
            case {"refused": str(why), "because": str(because)}:
                status = _REFUSALS.get(because, HTTPStatus.SERVICE_UNAVAILABLE)
                raise RequestError(status, why)
        asks = {"predict": 0, "text": excerpt(question.prompt), "scope": question.lora}
        self._worker.receive(number, {**asks, "asked": msgspec.to_builtins(question.asked)})
        try:
            while "predicted" not in (found := await told.get()):
                pass  # news of its model
            if found["distribution"] is None:
                raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is known yet")
            return LengthDistribution.from_fields(found["distribution"])
        finally:
            self._worker.disconnect(number)

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


def read_question(content: bytes | bytearray) -> Question:
    """A request's body. Raises RequestError."""
    try:
        return msgspec.convert(json.loads(content), Question)
    except (ValueError, RecursionError) as error:
        what = "the body" if isinstance(error, msgspec.ValidationError) else "the body is no JSON"
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{what}: {error}") from error


def _answer(question: Question, found: LengthDistribution) -> dict[str, Any]:
    if question.max_tokens is not None:
        found = found.capped(question.max_tokens)
    return {
        "model": question.model,
        "source": found.source,
        "effective_samples": found.effective_samples,
        "mean": found.mean(),
        "osl": max(1, round(found.mean())),
        "quantiles": {f"{q:g}": found.quantile(q) for q in question.quantiles},
        "lengths": found.lengths.tolist(),
        "probabilities": found.weights.tolist(),
    }


def _check_size(num_bytes: int) -> None:
    if num_bytes > _MAX_BODY_BYTES:
        most = f"the body may have {_MAX_BODY_BYTES} bytes"
        raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, most)
