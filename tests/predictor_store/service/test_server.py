"""A service in a thread, over real sockets: what one client does, the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import itertools
import json
import os
import runpy
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
import uvloop

from predictor_store.data.store_info import facts
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.model import folder_of_model
from predictor_store.service import protocol, sockets
from predictor_store.service.client import PredictorClient
from predictor_store.service.http import PATH
from predictor_store.service.link import Link, PredictorError, connect_worker
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.file import StoreError
from predictor_store.store.store import Store
from sage_sched.address import Address
from sage_sched.config import PredictorConfig, SageConfig, StoreConfig
from sage_sched.distribution import LengthDistribution
from tests.pages import DOCS

TOKEN = "a token that nobody guesses"


class Clock:
    """By which deadlines go by: the host's, and what a test adds."""

    now_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop) -> float:
        return time.monotonic() + self.now_s


@dataclass
class Service:
    config: SageConfig
    worker: Worker
    clock: Clock

    @property
    def over_tcp(self) -> bool:
        return "/" not in self.config.predictor.service

    def connect(self, model: str = "one") -> Link:
        link = connect_worker(self.config, model)
        link.socket.settimeout(60)
        return link

    def raw(self) -> socket.socket:
        connected = sockets.connect(Address.parse(self.config.predictor.service))
        connected.settimeout(60)
        return connected


@pytest.fixture(autouse=True)
def _another_loop_is_preferred() -> Iterator[None]:
    """As in every process that has imported SGLang."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@pytest.fixture(params=["unix", "tcp"])
def service(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    embedder: Embedder,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Service]:
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    if request.param == "unix":
        address = Address(path=str(tmp_path / "service"))
        listener, token = sockets.listen(address), ""
    else:
        listener, token = socket.create_server(("127.0.0.1", 0)), TOKEN
        address = Address(host="127.0.0.1", port=listener.getsockname()[1])
        monkeypatch.setenv(sockets.TOKEN_VARIABLE, TOKEN)
    config = SageConfig(StoreConfig(str(tmp_path / "store")), PredictorConfig(service=str(address)))
    worker = Worker(config, by_model=True)
    clock = Clock()
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: clock(loop))
    server = Server(worker, listener, token)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield Service(config, worker, clock)
    server.stop()
    thread.join()
    worker.close()


def ask(
    link: Link, handle: int, text: str, asked: dict[str, int] | None = None
) -> LengthDistribution:
    message = {"predict": handle, "text": text, "scope": "", "asked": asked or {}}
    link.socket.sendall(protocol.encode(message))
    found = protocol.decode_distribution(until(link, "predicted")["distribution"])
    assert found is not None
    return found


def end(link: Link, handle: int, output_tokens: int) -> None:
    message = {"finished": handle, "input_tokens": 5, "censored": False}
    link.socket.sendall(protocol.encode({**message, "output_tokens": output_tokens}))


def until(link: Link, kind: str, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    for message in link.messages:
        if kind in message and holds(message[kind]):
            return message
    raise ConnectionResetError


def share_of(found: LengthDistribution, length: int) -> float:
    return float(found.weights[found.lengths == length].sum())


def test_models_are_told_apart_and_clients_of_one_share(service: Service) -> None:
    one, other, same = service.connect("one"), service.connect("../other"), service.connect("one")
    for link, length in ((one, 7), (other, 900)):
        ask(link, 0, "How high is the Zugspitze?")
        for _ in range(20):
            end(link, 0, length)
        until(link, "stats", lambda stats: stats["num_recorded"] == 20)
    assert share_of(ask(same, 0, "How high is the Zugspitze?"), 7) > 0.8
    assert share_of(ask(other, 1, "How high is the Zugspitze?"), 900) > 0.8
    # Handles are each client's own: this one has answered nothing.
    end(same, 0, 7)
    until(same, "stats", lambda stats: stats["num_recorded"] == 21)
    for link in (one, other, same):
        link.close()
    root = Path(service.config.store.path)
    assert {folder.parent for folder in root.rglob("history.sqlite3")} == {
        folder_of_model(service.config.store, "one"),
        folder_of_model(service.config.store, "../other"),
    }
    assert folder_of_model(service.config.store, "x" * 10_000).name.isascii()


JUNK = [
    b"",
    b"\x00\xff" * 1000 + b"\n",
    b"{",
    b'{"hello": 1, "model": 5}\n',
    b'{"predict": 1, "text": "before the hello", "scope": ""}\n',
    b"[" * 100_000 + b"\n",
    b"{" + b"x" * 3_000_000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /predict HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT /predict HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.0\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 19 + b"\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /predict HTTP/1.1\r\nX: " + b"x" * 100_000,
]


def test_junk_and_half_messages_of_one_are_no_matter_to_others(service: Service) -> None:
    other = service.connect()
    junk = []
    for piece in JUNK:
        connected = service.raw()
        with contextlib.suppress(OSError):  # it may have hung up already
            connected.sendall(piece)
        junk.append(connected)
    # One that has been let in, sends junk, and half of a message as it dies.
    greeted = service.connect()
    greeted.socket.sendall(
        b'junk\n{"predict": 1, "text": ["x"], "scope": ""}\n[]\n{"predict": 2, "te'
    )
    until(other, "stats", lambda stats: stats["num_malformed"] == 3)
    greeted.close()
    for handle in range(3):
        ask(other, handle, "Still there?")
    for connected in junk:
        connected.close()
    ask(other, 3, "Still there?")
    other.close()


def test_a_client_that_takes_nothing_in_is_hung_up_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.connection._MAX_UNSENT_BYTES", 20_000)
    hung, other = service.connect(), service.connect()
    questions = b"".join(
        protocol.encode({"predict": handle, "text": "x", "scope": ""}) for handle in range(1000)
    )

    def keep_asking() -> None:
        while True:
            hung.socket.sendall(questions)

    with pytest.raises(ConnectionError):
        keep_asking()
    ask(other, 1, "Still there?")
    hung.close()
    other.close()


HALVES = [
    b"",
    b"{",
    b"P",
    b"POST /predict HTTP/1.1\r\nHost: x\r\n",
    b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nAuthorization: Bearer "
    + TOKEN.encode()
    + b"\r\n\r\n{",
]


def test_who_has_not_said_all_in_time_is_hung_up_on(service: Service) -> None:
    """All of a hello, or of an HTTP request, however many pieces of it have come."""
    halves = [service.raw() for _ in HALVES]
    for connected, half in zip(halves, HALVES, strict=True):
        connected.sendall(half)
    link = service.connect()  # who comes later is taken in later
    service.clock.now_s += 9
    ask(link, 1, "In time?")
    service.clock.now_s += 2
    told = [all_of(connected) for connected in halves]
    assert told[:-1] == [b""] * (len(HALVES) - 1)
    assert told[-1].startswith(b"HTTP/1.1 408 ")
    service.clock.now_s += 1e9
    ask(link, 2, "Still there?")
    link.close()


def all_of(connected: socket.socket) -> bytes:
    """Until the other side hangs up."""
    with connected:
        return b"".join(iter(lambda: connected.recv(1 << 16), b""))


def test_strangers_keep_nobody_out(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.service.server._MAX_CONNECTIONS", 4)
    known = service.connect()
    strangers = [service.raw() for _ in range(20)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):  # it has made room already
            stranger.sendall(b"{" if number % 2 else b"P")
    assert post(service, {"model": "one", "prompt": "x"})[0] == 200
    others = [service.connect() for _ in range(3)]
    for link in (known, *others):
        ask(link, 1, "Still there?")
    # They are all gone, and those who have said hello make room for nobody.
    for stranger in (*strangers, service.raw()):
        with contextlib.suppress(ConnectionError):
            assert all_of(stranger) == b""
    for link in (known, *others):
        ask(link, 2, "Still there?")
        link.close()


def test_who_is_refused_while_it_still_sends_hears_why(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the host takes.
    monkeypatch.setattr("predictor_store.service.connection._END_SECONDS", 60.0)
    other = service.connect()
    with service.raw() as refused:
        refused.sendall(b'{"hello": 1, "model": "one"}\n' + b"junk\n" * 1_000_000)
        refused.shutdown(socket.SHUT_WR)
        lines = all_of(refused).splitlines()
    assert [json.loads(line)["because"] for line in lines] == ["version"]
    if service.over_tcp:
        body = b"x" * 20_000_000
        assert post(service, body, Authorization="Bearer wrong")[0] == 401
    ask(other, 1, "Still there?")
    other.close()


def test_the_token_comes_before_the_body(service: Service) -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
    with service.raw() as connected:
        connected.sendall(head + b"Authorization: Bearer wrong\r\nExpect: 100-continue\r\n\r\n")
        told = connected.recv(1000)
    assert told.startswith(b"HTTP/1.1 401 " if service.over_tcp else b"HTTP/1.1 100 ")


def test_what_is_unsent_to_one_that_is_refused_is_sent_as_it_sends_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Socket buffers are full of answers; then it hears why it is refused, and the service goes
    on."""
    monkeypatch.setattr("predictor_store.service.connection._END_SECONDS", 60.0)
    model = "m" * 1000
    other = service.connect(model)
    quantiles = [number / 100 for number in range(100)]
    body = json.dumps({"model": model, "prompt": "x", "quantiles": quantiles})
    good = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    good += f"Authorization: Bearer {TOKEN}\r\n\r\n{body}"
    # More than the buffers of a Unix socket hold.
    num_good = 400_000 // len(json.dumps(post(service, body.encode())[1]))
    with service.raw() as connected:
        for _ in range(num_good):
            connected.sendall(good.encode())
            for number in range(3):  # it is answered meanwhile
                ask(other, number, "Is it answered?")
        connected.sendall(b"junk\r\n\r\n" + b"more\n" * 1000)
        ask(other, 2, "Is it refused?")
        connected.sendall(b"more\n" * 1000)
        told = all_of(connected)
    assert told.count(b"HTTP/1.1 200 ") == num_good
    assert told.count(b"HTTP/1.1 400 ") == 1
    ask(other, 3, "Still there?")
    other.close()


def test_where_no_more_files_may_be_opened_clients_are_taken_in_later(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    worker = Worker(SageConfig(StoreConfig(str(tmp_path / "store"))), by_model=True)
    fails = [True, True]

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if fails and fails.pop():
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with Exhausted(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "service"))
        listener.listen()
        server = Server(worker, listener)
        thread = threading.Thread(target=server.run)
        thread.start()
        client.settimeout(60)
        client.connect(str(tmp_path / "service"))
        client.sendall(protocol.encode(protocol.hello("nonce")))
        assert b"proof" in client.recv(1000)
        server.stop()
        thread.join()
        worker.close()


def test_another_version_is_told_both(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "hello", lambda nonce: {"hello": 99, "model": "one"})
    with pytest.raises(PredictorError, match=f"version 99 .* {protocol.VERSION}:"):
        service.connect()


@contextmanager
def service_that_says(tmp_path: Path, *pieces: bytes) -> Iterator[SageConfig]:
    with closing(sockets.listen(Address(path=str(tmp_path / "other")))) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected, contextlib.suppress(OSError):
                connected.recv(1000)
                for piece in pieces:
                    connected.sendall(piece)
                connected.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        yield SageConfig(predictor=PredictorConfig(service=str(tmp_path / "other")))
        thread.join()


def test_a_service_of_another_version_is_told_apart(tmp_path: Path) -> None:
    said = b'{"ready": {}, "prior": null, "version": 77}\n'
    with (
        service_that_says(tmp_path, said) as config,
        pytest.raises(PredictorError, match=f"version 77 .* {protocol.VERSION}:"),
    ):
        connect_worker(config, "one")


@pytest.mark.parametrize("ready", [b"{}", b'{"process": 1}, "prior": 5', b"5"])
def test_what_is_no_service_is_told_apart(tmp_path: Path, ready: bytes) -> None:
    said = b'{"version": %d, "ready": %s}\n' % (protocol.VERSION, ready)
    with (
        service_that_says(tmp_path, said) as config,
        pytest.raises(PredictorError, match="no predictor service"),
    ):
        connect_worker(config, "one")


def test_a_service_that_never_says_all_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = itertools.count(0.0, 200.0)
    monkeypatch.setattr("predictor_store.service.link.time.monotonic", lambda: next(now_s))
    with (
        service_that_says(tmp_path, *[b"{"] * 1000) as config,
        pytest.raises(PredictorError, match="not ready after 600 s"),
    ):
        connect_worker(config, "one")


Says = Callable[[str], bytes]


def lines(*messages: dict[str, Any]) -> bytes:
    return b"".join(map(protocol.encode, messages))


READY = {"version": protocol.VERSION, "ready": {"process": 1}, "prior": None}
IMPOSTORS: list[Says] = [
    lambda nonce: lines(READY),
    lambda nonce: lines({"nonce": nonce, "proof": "", "version": protocol.VERSION}, READY),
    lambda nonce: lines({"nonce": nonce, "proof": None, "version": protocol.VERSION}, READY),
    lambda nonce: lines(
        {
            "nonce": "x",
            "proof": protocol.proof("not the token", "service", nonce, "x"),
            "version": protocol.VERSION,
        },
        READY,
    ),
    lambda nonce: lines(protocol.refusal("your token, please", "token")),
]


@pytest.mark.parametrize("says", IMPOSTORS)
def test_who_takes_the_port_of_a_service_learns_nothing(
    says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sockets.TOKEN_VARIABLE, TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor() -> bytes:
            connected, _ = listener.accept()
            with connected:
                heard = connected.recv(1000)
                connected.sendall(says(json.loads(heard)["nonce"]))
                with contextlib.suppress(ConnectionError):
                    heard += all_of(connected)
                return heard

        told = pool.submit(impostor)
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PredictorError):
            connect_worker(SageConfig(predictor=PredictorConfig(service=at)), "my model")
        assert told.result().count(b"\n") == 1
        assert TOKEN.encode() not in told.result()
        assert b"my model" not in told.result()


def test_a_proof_is_of_one_side_and_one_connection() -> None:
    sides: list[Literal["client", "service"]] = ["client", "service"]
    made = {
        protocol.proof(token, side, *nonces)
        for token in (TOKEN, TOKEN + "x", "")
        for side in sides
        for nonces in itertools.product(("a", "b", "a b", ""), repeat=2)
    }
    assert len(made) == 3 * 2 * 16


@contextmanager
def served(worker: Worker, listener: socket.socket) -> Iterator[Server]:
    server = Server(worker, listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()


@pytest.mark.parametrize("state", ["down", "hung", "foreign", "full", "another version"])
def test_a_server_starts_without_its_service_and_finds_it_later(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    monkeypatch.setattr("predictor_store.service.supervisor._MAX_BACKOFF_SECONDS", 0.01)
    if state == "hung":
        monkeypatch.setattr("predictor_store.service.client._SERVICE_PATIENCE_S", 0.01)
    address = Address(path=str(tmp_path / "service"))
    config = SageConfig(
        StoreConfig(str(tmp_path / "store")),
        PredictorConfig(service=str(address), deadline_ms=600_000),
    )
    says = {
        "foreign": b"HTTP/1.1 400 Bad Request\r\n\r\n",
        "full": lines(protocol.refusal("no more", "busy")),
        "another version": lines({"version": 99}),
    }
    client = PredictorClient(config, "one")
    with contextlib.ExitStack() as until_it_is_there:
        if state != "down":
            other = until_it_is_there.enter_context(closing(sockets.listen(address)))
        if state in says:
            speaker = threading.Thread(target=answer_all, args=(other, says[state]))
            speaker.start()
            until_it_is_there.callback(speaker.join)
            until_it_is_there.callback(lambda: other.shutdown(socket.SHUT_RDWR))
        client.start()
        found = asyncio.run(client.predict("Who is there?"))
        assert found.handle is None
        assert found.distribution is not None
        assert found.distribution.source == "prior"
    listener = sockets.listen(address)
    worker = Worker(config, by_model=True)
    with closing(worker), served(worker, listener), closing(client):
        while not client.stats()["worker_alive"]:
            time.sleep(0.01)
        assert asyncio.run(client.predict("Who is there?")).handle is not None
        assert client.stats()["num_worker_restarts"] == 0


def answer_all(listener: socket.socket, says: bytes) -> None:
    """Until it no longer listens."""
    with contextlib.suppress(OSError):
        while True:
            connected, _ = listener.accept()
            with connected, contextlib.suppress(OSError):
                connected.recv(1000)
                connected.sendall(says)


ODD: list[Any] = [
    *(
        {"stats": stats}
        for stats in (
            5, [], {}, {"process": "x"}, {"process": 1, "num_lost": "x"},
            {"process": 1, "num_recorded": -1}, {"process": 1, "num_records": 10**30},
            {"process": 1, "quality": {"widened": []}}, {"process": 1, "quality": 5},
        )
    ),
    {"stats": {"process": 1}, "prior": 5},
    {"stats": {"process": 1}, "prior": {"lengths": {}}},
]  # fmt: skip


def test_whatever_a_service_says_another_is_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.supervisor._MAX_BACKOFF_SECONDS", 0.01)
    address = Address(path=str(tmp_path / "service"))
    client = PredictorClient(SageConfig(predictor=PredictorConfig(service=str(address))), "one")
    firsts = [READY | {"ready": odd["stats"]} for odd in ODD[:7]]
    with closing(sockets.listen(address)) as listener:
        starter = threading.Thread(target=client.start)
        starter.start()
        for first, *then in [*([odd] for odd in firsts), *([READY, odd] for odd in ODD), [READY]]:
            connected, _ = listener.accept()
            with connected, contextlib.suppress(OSError):
                nonce = json.loads(connected.recv(1000))["nonce"]
                proof = protocol.proof("", "service", nonce, "x")
                connected.sendall(
                    lines({"nonce": "x", "proof": proof, "version": protocol.VERSION})
                )
                connected.recv(1000)
                connected.sendall(lines(first, *then))
                if then:
                    all_of(connected)  # the client hangs up
        json.dumps(client.stats())
        starter.join()
        client.close()


def test_whoever_hurries_writes_at_once(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server's worker does after Ctrl-C."""
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    monkeypatch.setattr("predictor_store.service.server._REPORT_SECONDS", 1e9)
    address = Address(path=str(tmp_path / "service"))
    config = SageConfig(StoreConfig(str(tmp_path / "store")), PredictorConfig(service=str(address)))
    worker = Worker(config)
    with closing(worker), served(worker, sockets.listen(address)) as server:
        link = connect_worker(config, "")
        ask(link, 0, "How high is the Zugspitze?")
        end(link, 0, 7)
        server.hurry()  # what has come, and what comes after
        end(link, 0, 8)
        until(link, "stats", lambda stats: stats["num_recorded"] == 2)
        assert facts(tmp_path / "store")["num_records"] == 2
        link.close()


def test_over_tcp_alone_a_token_is_asked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not service.over_tcp:
        service.connect().close()
        return
    monkeypatch.setenv(sockets.TOKEN_VARIABLE, "another, as long as that")
    with pytest.raises(PredictorError, match="token"):
        service.connect()
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    named = replace(service.config.predictor, service_token_file=str(file))
    connect_worker(replace(service.config, predictor=named), "one").close()


def test_a_store_that_is_refused_is_refused_to_its_model_alone(service: Service) -> None:
    folder = folder_of_model(service.config.store, "damaged")
    Store(StoreConfig(str(folder)), "another encoder", 3).close()
    with pytest.raises(StoreError, match="another encoder"):
        service.connect("damaged")
    link = service.connect("sound")
    ask(link, 1, "Still there?")
    link.close()


def post(service: Service, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = service.raw()
    if service.over_tcp:
        headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    body = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", PATH, body, headers)
    with closing(connection), connection.getresponse() as response:
        return response.status, json.loads(response.read())


def test_a_router_asks_for_a_distribution_as_json(service: Service) -> None:
    link = service.connect("one")
    ask(link, 0, "How high is the Zugspitze?")
    for length in (10, 3000) * 20:
        end(link, 0, length)
    until(link, "stats", lambda stats: stats["num_recorded"] == 40)
    prompt = {"model": "one", "prompt": "How high is the Zugspitze?"}
    status, found = post(service, {**prompt, "quantiles": [0.1, 0.9]})
    assert status == 200
    assert found["quantiles"] == {"0.1": 10, "0.9": 3000}
    assert sum(found["probabilities"]) == pytest.approx(1)
    assert len(found["probabilities"]) == len(found["lengths"])
    assert found["source"] == "history"
    assert found["mean"] == pytest.approx(
        sum(n * p for n, p in zip(found["lengths"], found["probabilities"], strict=True))
    )
    assert found["osl"] == round(found["mean"])
    assert max(post(service, {**prompt, "max_tokens": 100})[1]["lengths"]) == 100
    # The same words, asked otherwise.
    thinking = {"thinks": 1, "num_tools": 3}
    ask(link, 1, prompt["prompt"], thinking)
    for _ in range(40):
        end(link, 1, 500)
    until(link, "stats", lambda stats: stats["num_recorded"] == 80)
    assert post(service, {**prompt, "asked": thinking})[1]["quantiles"]["0.5"] == 500
    assert post(service, prompt)[1]["quantiles"]["0.1"] == 10
    link.close()


class Frontend(BaseHTTPRequestHandler):
    """Answers with what it was asked."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_example_of_the_page_tells_a_frontend_what_the_service_expects(
    service: Service,
) -> None:
    if not service.over_tcp:
        pytest.skip("the example asks over TCP")
    ours = runpy.run_path(str(DOCS / "examples" / "dynamo_osl.py"))
    link = service.connect("one")
    for handle in range(20):
        ask(link, handle, "How high is the Zugspitze?")
        end(link, handle, 300)
    until(link, "stats", lambda stats: stats["num_recorded"] == 20)
    _, known = post(service, {"model": "one", "prompt": "How high is the Zugspitze?"})
    with HTTPServer(("127.0.0.1", 0), Frontend) as frontend:
        threading.Thread(target=frontend.serve_forever).start()
        for model, hints in (("one", {"osl": known["osl"]}), ("unknown", {})):
            said = {"role": "user", "content": "How high is the Zugspitze?"}
            chat = {"model": model, "messages": [said]}
            at = f"127.0.0.1:{frontend.server_port}"
            heard = ours["ask"](chat, at, service.config.predictor.service, TOKEN)
            assert heard == {**chat, "nvext": {"agent_hints": hints}}
        frontend.shutdown()
    link.close()


def test_one_connection_asks_again_and_of_other_models(service: Service) -> None:
    for model, length in (("one", 7), ("other", 900)):
        link = service.connect(model)
        ask(link, 0, "How high is the Zugspitze?")
        for _ in range(20):
            end(link, 0, length)
        until(link, "stats", lambda stats: stats["num_recorded"] == 20)
        link.close()
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = service.raw()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with closing(connection):
        for model, length in (("one", 7), ("other", 900), ("one", 7)):
            body = json.dumps({"model": model, "prompt": "How high is the Zugspitze?"})
            # In pieces, as one that does not know how long it is.
            connection.request("POST", PATH, iter([body[:9].encode(), body[9:].encode()]), headers)
            found = json.loads(connection.getresponse().read())
            assert (found["model"], found["quantiles"]["0.5"]) == (model, length)
            service.clock.now_s += 20  # to the next request
        service.clock.now_s += 41
        assert connection.sock.recv(1) == b""


def test_who_waits_for_leave_to_send_its_body_gets_it(service: Service) -> None:
    service.connect("one").close()
    body = json.dumps({"model": "one", "prompt": "x"}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += f"Expect: 100-continue\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    with service.raw() as connected:
        connected.sendall(head.encode())
        assert connected.recv(1000).startswith(b"HTTP/1.1 100 ")
        connected.sendall(body)
        assert all_of(connected).startswith(b"HTTP/1.1 200 ")


def test_a_prediction_that_does_not_come_is_not_waited_for_for_ever(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of_model(service.config.store, "kept")
    Store(StoreConfig(str(folder)), fingerprint(), dimension()).close()
    assert post(service, {"model": "kept", "prompt": "x"})[0] == 200
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(service.worker, "step", lambda: [])
        answer = pool.submit(post, service, {"model": "kept", "prompt": "x"})
        while not service.worker.busy:
            time.sleep(0.01)
        service.clock.now_s += 11
        status, told = answer.result()
    assert (status, told["error"]) == (503, "no prediction within 10 s")
    link = service.connect("kept")
    ask(link, 1, "Awake by now?")
    link.close()


BAD = [
    (b"junk", 400, "no JSON"),
    (b"[" * 100_000, 400, "no JSON"),
    ([], 400, "Expected `object`"),
    ({"prompt": "x"}, 400, "missing required field `model`"),
    ({"model": "one", "prompt": 5}, 400, "Expected `str`, got `int` - at `$.prompt`"),
    ({"model": "one", "prompt": "x", "other": 1}, 400, "unknown field `other`"),
    ({"model": "one", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "one", "prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ({"model": "one", "prompt": "x", "quantiles": [2]}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "quantiles": [0.5] * 101}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "asked": [1]}, 400, "at `$.asked`"),
    ({"model": "one", "prompt": "x", "asked": {"thinks": 2.5}}, 400, "thinks"),
    ({"model": "x" * 1001, "prompt": "x"}, 400, "length <= 1000 - at `$.model`"),
    ({"model": "unheard of", "prompt": "x"}, 404, "unheard of"),
    ({"model": "\ud800", "prompt": "x"}, 404, "ud800"),
    (b"x" * (1 << 20) + b"x", 413, "bytes"),
]


def test_what_is_wrong_with_a_request_is_said(service: Service) -> None:
    link = service.connect("one")
    for body, status, said in BAD:
        found, told = post(service, body)
        assert (found, said in told["error"]) == (status, True), told
    # Nothing was begun for a model that only a router knows.
    assert not folder_of_model(service.config.store, "unheard of").exists()
    if service.over_tcp:
        good = {"model": "one", "prompt": "x"}
        assert post(service, good, Authorization="Bearer wrong")[0] == 401
        assert post(service, good, Authorization="")[0] == 401
    ask(link, 1, "Still there?")
    link.close()


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "service"
    address = Address(path=str(path))
    listener = sockets.listen(address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    with pytest.raises(PredictorError, match="another service listens"):
        sockets.listen(address)
    listener.close()  # as if it had been killed: the file is left
    again = sockets.listen(address)
    sockets.close(again)
    assert not path.exists()
    path.write_text("somebody's file")
    with pytest.raises(PredictorError, match="no socket"):
        sockets.listen(address)
    with pytest.raises(PredictorError, match="cannot listen"):
        sockets.listen(Address(path=str(tmp_path / ("x" * 200))))


def test_of_two_services_that_start_at_once_one_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = Address(path=str(tmp_path / "service"))
    sockets.listen(address).close()  # as if it had been killed
    unlink, others = Path.unlink, list[Future[socket.socket]]()

    def unlink_late(path: Path) -> None:
        if not others:
            others.append(threads.submit(sockets.listen, address))
            with contextlib.suppress(TimeoutError):
                others[0].exception(timeout=0.3)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    with (
        ThreadPoolExecutor() as threads,
        sockets.listen(address),
        pytest.raises(PredictorError, match="another service listens"),
    ):
        others[0].result()


def test_a_token_is_long_and_its_file_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sockets.TOKEN_VARIABLE, "short")
    with pytest.raises(PredictorError, match=sockets.TOKEN_VARIABLE):
        sockets.token_of(PredictorConfig())
    with pytest.raises(PredictorError, match="service_token_file"):
        sockets.token_of(PredictorConfig(service_token_file=str(tmp_path / "none")))
    monkeypatch.delenv(sockets.TOKEN_VARIABLE)
    assert sockets.token_of(PredictorConfig()) == ""


def test_a_host_that_is_gone_is_noticed() -> None:
    with socket.socket() as connected:
        sockets.set_up(connected)
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
