"""A service in a thread, over real sockets: what one client does, the others do not notice."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from predictor_store import json_requests, protocol, service_socket
from predictor_store.embedder import Embedder
from predictor_store.link import Link, PredictorError, connect_worker
from predictor_store.model_history import folder_of_model
from predictor_store.server import Server
from predictor_store.service_socket import ServiceError
from predictor_store.store import Store
from predictor_store.store_file import StoreError
from predictor_store.worker import Worker
from sage_sched.address import Address
from sage_sched.config import PredictorConfig, SageConfig, StoreConfig
from sage_sched.distribution import LengthDistribution

TOKEN = "a token that nobody guesses"


@dataclass
class Service:
    config: SageConfig
    worker: Worker

    def connect(self, model: str = "one") -> Link:
        link = connect_worker(self.config, model)
        link.socket.settimeout(60)
        return link

    def raw(self) -> socket.socket:
        connected = service_socket.connect(Address.parse(self.config.predictor.service))
        connected.settimeout(60)
        return connected


@pytest.fixture(params=["unix", "tcp"])
def service(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    embedder: Embedder,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Service]:
    monkeypatch.setattr("predictor_store.worker.Embedder", lambda encoder, num_threads: embedder)
    if request.param == "unix":
        address = Address(path=str(tmp_path / "service"))
        listener, token = service_socket.listen(address), ""
    else:
        listener, token = socket.create_server(("127.0.0.1", 0)), TOKEN
        address = Address(host="127.0.0.1", port=listener.getsockname()[1])
        monkeypatch.setenv(service_socket.TOKEN_VARIABLE, TOKEN)
    config = SageConfig(StoreConfig(str(tmp_path / "store")), PredictorConfig(service=str(address)))
    worker = Worker(config, by_model=True)
    server = Server(worker, listener, token)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield Service(config, worker)
    server.stop()
    thread.join()
    server.close()
    worker.close()
    service_socket.remove(address, listener)


def ask(
    link: Link, handle: int, text: str, asked: dict[str, int] | None = None
) -> LengthDistribution:
    message = {"predict": handle, "text": text, "scope": "", "asked": asked or {}}
    link.socket.sendall(protocol.encode(message))
    found = protocol.decode_distribution(until(link, "predicted")["distribution"])
    assert found is not None
    return found


def end(link: Link, handle: int, output_tokens: int) -> None:
    message = {"finished": handle, "input_tokens": 5, "censored": False, "late": False}
    link.socket.sendall(protocol.encode({**message, "output_tokens": output_tokens}))


def until(link: Link, kind: str, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    while True:
        for message in link.receive():
            if kind in message and holds(message[kind]):
                return message


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
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /predict HTTP/1.1\r\nContent-Length: 10\r\n\r\n",
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
    monkeypatch.setattr("predictor_store.connection._MAX_UNSENT_BYTES", 20_000)
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


def test_who_says_nothing_makes_room(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.server._SILENT_SECONDS", 0.0)
    with service.raw() as silent:
        assert silent.recv(1) == b""


def test_another_version_is_told_both(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "hello", lambda *args: {"hello": 99, "model": "one"})
    with pytest.raises(PredictorError, match=f"version 99 .* {protocol.VERSION}:"):
        service.connect()


def test_a_service_of_another_version_is_told_apart(tmp_path: Path) -> None:
    with closing(service_socket.listen(Address(path=str(tmp_path / "old")))) as listener:
        config = SageConfig(predictor=PredictorConfig(service=str(tmp_path / "old")))

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.recv(1000)
                connected.sendall(b'{"ready": {}, "prior": null, "version": 77}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PredictorError, match=f"version 77 .* {protocol.VERSION}:"):
            connect_worker(config, "one")
        thread.join()


def test_over_tcp_alone_a_token_is_asked_for(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "/" in service.config.predictor.service:
        service.connect().close()
        return
    monkeypatch.setenv(service_socket.TOKEN_VARIABLE, "another, as long as that")
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
    if "/" not in service.config.predictor.service:
        headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    body = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", json_requests.PATH, body, headers)
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


BAD = [
    (b"junk", 400, "no JSON"),
    (b"[" * 100_000, 400, "no JSON"),
    ([], 400, "no JSON object"),
    ({"prompt": "x"}, 400, "model must be a string"),
    ({"model": "one", "prompt": 5}, 400, "prompt must be a string"),
    ({"model": "one", "prompt": "x", "other": 1}, 400, "unknown field 'other'"),
    ({"model": "one", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "one", "prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ({"model": "one", "prompt": "x", "quantiles": [2]}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "quantiles": [0.5] * 101}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "asked": [1]}, 400, "asked must be an object"),
    ({"model": "one", "prompt": "x", "asked": {"thinks": 2.5}}, 400, "thinks"),
    ({"model": "x" * 1001, "prompt": "x"}, 400, "model may have"),
    ({"model": "unheard of", "prompt": "x"}, 404, "unheard of"),
    (b"x" * (1 << 20) + b"x", 413, "bytes"),
]


def test_what_is_wrong_with_a_request_is_said(service: Service) -> None:
    link = service.connect("one")
    for body, status, said in BAD:
        found, told = post(service, body)
        assert (found, said in told["error"]) == (status, True), told
    # Nothing was begun for a model that only a router knows.
    assert not folder_of_model(service.config.store, "unheard of").exists()
    if "/" not in service.config.predictor.service:
        good = {"model": "one", "prompt": "x"}
        assert post(service, good, Authorization="Bearer wrong")[0] == 401
        assert post(service, good, Authorization="")[0] == 401
    ask(link, 1, "Still there?")
    link.close()


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "service"
    address = Address(path=str(path))
    listener = service_socket.listen(address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    with pytest.raises(ServiceError, match="another service listens"):
        service_socket.listen(address)
    listener.close()  # as if it had been killed: the file is left
    again = service_socket.listen(address)
    service_socket.remove(address, again)
    assert not path.exists()
    path.write_text("somebody's file")
    with pytest.raises(ServiceError, match="no socket"):
        service_socket.listen(address)
    with pytest.raises(ServiceError, match="cannot listen"):
        service_socket.listen(Address(path=str(tmp_path / ("x" * 200))))


def test_a_token_is_long_and_its_file_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service_socket.TOKEN_VARIABLE, "short")
    with pytest.raises(ServiceError, match=service_socket.TOKEN_VARIABLE):
        service_socket.token_of(PredictorConfig())
    with pytest.raises(ServiceError, match="service_token_file"):
        service_socket.token_of(PredictorConfig(service_token_file=str(tmp_path / "none")))
    monkeypatch.delenv(service_socket.TOKEN_VARIABLE)
    assert service_socket.token_of(PredictorConfig()) == ""
