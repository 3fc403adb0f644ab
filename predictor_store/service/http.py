"""Serves HTTP for routers, gateways and monitoring: POST /predict, GET /health and GET /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Iterator
from typing import Annotated, cast

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from predictor_store.predict.asked import NOTHING_ASKED, Asked
from predictor_store.predict.features import excerpt
from predictor_store.predict.model import Stats
from predictor_store.service.messages import Predict, Predicted, Refused, ToClient, Welcome, valid
from predictor_store.service.worker import Worker
from sage_sched.distribution import LengthDistribution

# The time for a request's whole head to arrive: after the connection opened, or after the previous
# answer.
_FIRST_SECONDS, _NEXT_SECONDS = 10.0, 60.0
# The time from the head to the end of the body, and from there to the answer.
_BODY_SECONDS = _ANSWER_SECONDS = 10.0
_MAX_BODY_BYTES = 1 << 20
_GAUGES = {"num_records", "num_unwritten"}

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


class Asker:
    """A client of the worker that asks once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.greeting: asyncio.Future[Welcome | Refused] = loop.create_future()
        self.answer: asyncio.Future[Predicted] = loop.create_future()

    def tell(self, message: ToClient) -> None:
        match message:
            case Welcome() | Refused() if not self.greeting.done():
                self.greeting.set_result(message)
            case Predicted() if not self.answer.done():
                self.answer.set_result(message)


class HttpFront:
    """Serves HTTP in the worker's own event loop."""

    def __init__(self, worker: Worker, token: str) -> None:
        """Make a front. token: the token that requests must carry."""
        self._worker = worker
        self._token = token
        self.app = Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: _refused},
        )

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled, then close the listener."""
        config = uvicorn.Config(
            self.app, http=_Hasty, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False,
        )  # fmt: skip
        with listener:
            await _Uvicorn(config).serve(sockets=[listener])

    async def _predict(self, request: Request) -> Response:
        self._check_token(request)
        question = _read(await _body(request))
        found = await self._predicted(question)
        if question.max_tokens is not None:
            found = found.capped(question.max_tokens)
        answer = {
            "model": question.model,
            "source": found.source,
            "effective_samples": found.effective_samples,
            "mean": found.mean(),
            "osl": max(1, round(found.mean())),
            "quantiles": {f"{q:g}": found.quantile(q) for q in question.quantiles},
            "lengths": found.lengths.tolist(),
            "probabilities": found.weights.tolist(),
        }
        return JSONResponse(answer)

    async def _predicted(self, question: Question) -> LengthDistribution:
        asker = Asker()
        self._worker.connect(asker, question.model, only_asks=True)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                match await asker.greeting:
                    case Refused(why=why, because=because):
                        raise HTTPException(404 if because == "model" else 503, why)
                text = valid(excerpt(question.prompt))
                self._worker.receive(asker, Predict(0, text, question.lora, question.asked))
                lengths = (await asker.answer).lengths
        except TimeoutError:
            raise HTTPException(503, f"no prediction within {_ANSWER_SECONDS:g} s") from None
        finally:
            self._worker.disconnect(asker)
        if lengths is None:
            raise HTTPException(503, "nothing is known yet")
        return lengths.read()

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _metrics(self, request: Request) -> Response:
        self._check_token(request)
        registry = CollectorRegistry()
        registry.register(self)
        return PlainTextResponse(generate_latest(registry))

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of Stats, by model, for prometheus_client."""
        by_model = self._worker.stats()
        for field in (name for name in Stats.__struct_fields__ if name.startswith("num_")):
            kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
            name = field.removeprefix("num_")
            family = kind(f"sage:service_{name}", f"{name} of the service", labels=["model"])
            for model, stats in by_model.items():
                family.add_metric([model], getattr(stats, field))
            yield family

    def _check_token(self, request: Request) -> None:
        scheme, _, said = request.headers.get("authorization", "").partition(" ")
        is_same = hmac.compare_digest(said.strip().encode(), self._token.encode())
        if scheme.lower() != "bearer" or not is_same:
            raise HTTPException(401, "the token is not the service's")


async def _body(request: Request) -> bytes:
    """Return the body. Raises HTTPException if it is too long, or too late."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body may have at most {_MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise HTTPException(408, "the body did not arrive in time") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body ends early") from None
    return bytes(body)


def _read(body: bytes) -> Question:
    try:
        return msgspec.json.decode(body, type=Question)
    except (ValueError, RecursionError) as error:
        what = "the body" if isinstance(error, msgspec.ValidationError) else "the body is no JSON"
        raise HTTPException(400, f"{what}: {error}") from error


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class _Hasty(H11Protocol):
    """Closes the connection of a client that does not send a whole head in time. uvicorn would wait
    for it forever, and unknown clients could take all file descriptors."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_request(_FIRST_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request(_NEXT_SECONDS)

    def _await_request(self, seconds: float) -> None:
        self.loop.call_later(seconds, self._give_up, self.cycle)

    def _give_up(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the service has handlers of its own
