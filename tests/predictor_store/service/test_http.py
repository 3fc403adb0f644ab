from __future__ import annotations

import http.client
import json
import runpy
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from predictor_store.predict.asked import Asked
from predictor_store.predict.model import folder_of_model
from predictor_store.service import endpoint
from predictor_store.service.http import HttpFront
from predictor_store.service.messages import Finished, Predict
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.store import file_of
from sage_sched.app.address import Address
from sage_sched.app.config import SageConfig, StoreConfig
from tests.pages import DOCS
from tests.predictor_store.samples import greeted

TOKEN = "a token that is hard to guess"
AUTHORIZED = {"Authorization": f"bearer  {TOKEN} "}
PROMPT = "How high is the Zugspitze?"


@dataclass
class Service:
    """worker: only for use before the service runs."""

    worker: Worker
    port: int

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def ask(
        self, body: Any = b"", path: str = "/predict", headers: Any = AUTHORIZED
    ) -> tuple[int, str]:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(self.connection()) as connection:
            connection.request("POST" if body else "GET", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Return a service that knows a model "one". Its answers have 10 or 3,000 tokens, and 500 with
    three tools. Only a question wakes it, because the periodic report never comes."""
    monkeypatch.setattr("predictor_store.service.server._REPORT_SECONDS", 1e9)
    with closing(Worker(SageConfig(StoreConfig(str(tmp_path))), by_model=True)) as worker:
        for model, lengths, asked in (
            ("one", (10, 3000), Asked()),
            ("one", (500, 500), Asked(thinks=1, num_tools=3)),
            ("other", (900, 900), Asked()),
        ):
            greeted(worker, 0, model)
            worker.receive(0, Predict(0, PROMPT, "", asked))
            worker.step()
            for length in lengths * 20:
                worker.receive(0, Finished(0, 5, length, censored=False))
        worker.report()
        worker.disconnect(0)
        listener = socket.create_server(("127.0.0.1", 0))
        router = endpoint.listen(Address(path=str(tmp_path / "service")))
        server = Server(worker, router, beside=partial(HttpFront(worker, TOKEN).serve, listener))
        thread = threading.Thread(target=server.run)
        thread.start()
        yield Service(worker, listener.getsockname()[1])
        server.stop()
        thread.join()


@pytest.mark.slow
def test_a_router_asks_for_distributions_as_json_on_one_connection(service: Service) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        body = json.dumps({"model": "one", "prompt": PROMPT} | more).encode()
        # In pieces, like a client that does not know the length.
        connection.request("POST", "/predict", iter([body[:9], body[9:]]), AUTHORIZED)
        answer = connection.getresponse()
        assert answer.status == 200
        return json.loads(answer.read())  # type: ignore[no-any-return]

    with closing(service.connection()) as connection:
        found = ask()
        lengths, shares = found.pop("lengths"), found.pop("probabilities")
        assert (sum(shares), lengths == sorted(lengths)) == (pytest.approx(1), True)
        mean = sum(n * p for n, p in zip(lengths, shares, strict=True))
        quantiles = {"0.1": 10, "0.25": 10, "0.5": 500, "0.75": 3000, "0.9": 3000, "0.99": 3000}
        assert found == {
            "model": "one", "source": "history", "effective_samples": pytest.approx(53, abs=0.1),
            "mean": pytest.approx(mean), "osl": round(mean), "quantiles": quantiles,
        }  # fmt: skip
        assert max(ask(max_tokens=100)["lengths"]) == 100
        assert ask(model="other")["quantiles"]["0.9"] == 900
        # The same words in another kind of request.
        assert ask(asked={"thinks": 1, "num_tools": 3})["quantiles"]["0.5"] == 500
        assert ask(lora="an adapter")["source"] == "warm"  # it belongs to other traffic
    assert service.ask(path="/health", headers={}) == (200, "ok\n")
    told = service.ask(path="/metrics")[1].splitlines()
    assert 'sage:service_recorded_total{model="one"} 80.0' in told
    assert 'sage:service_records{model="other"} 40.0' in told
    gauges = [line for line in told if line.endswith("gauge")]
    assert gauges == [f"# TYPE sage:service_{of} gauge" for of in ("records", "unwritten")]


BAD: list[tuple[Any, int, str]] = [
    (b"junk", 400, "no JSON"),
    (b"[" * 100_000, 400, "the body"),
    ({"prompt": "x"}, 400, "`model`"),
    ({"model": "one", "prompt": 5}, 400, "$.prompt"),
    ({"model": "one", "prompt": "x", "other": 1}, 400, "`other`"),
    ({"model": "one", "prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "one", "prompt": "x", "quantiles": [2]}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "quantiles": [0.5] * 101}, 400, "quantiles"),
    ({"model": "one", "prompt": "x", "asked": {"thinks": 2.5}}, 400, "thinks"),
    ({"model": "x" * 1001, "prompt": "x"}, 400, "$.model"),
    ({"model": "unheard of", "prompt": "x"}, 404, "unheard of"),
    ({"model": "damaged", "prompt": "x"}, 503, "is damaged"),
    (b"x" * (1 << 20) + b"x", 413, "bytes"),
    (b"x" * (1 << 20), 400, "no JSON"),
]


def test_an_error_names_the_fault_of_a_request(service: Service, tmp_path: Path) -> None:
    damaged = folder_of_model(StoreConfig(str(tmp_path)), "damaged")
    damaged.mkdir()
    file_of(damaged).write_bytes(b"damaged")
    for body, status, said in BAD:
        found, told = service.ask(body)
        assert (found, said in json.loads(told)["error"]) == (status, True), told
    # Nothing was begun for a model that only a router knows.
    assert not folder_of_model(StoreConfig(str(tmp_path)), "unheard of").exists()
    good = {"model": "one", "prompt": "\ud800"}
    for wrong in ("", "Bearer wrong", TOKEN, f"Basic {TOKEN}"):
        headers = {"Authorization": wrong}
        assert service.ask(good, headers=headers)[0] == 401
        assert service.ask(path="/metrics", headers=headers)[0] == 401
    assert service.ask(path="/predict")[0] == 405
    assert service.ask(path="/")[0] == 404


HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"
# Bytes that a client sends, and the answer at its timeout.
SLOW = [
    (b"", b""),
    (b"P", b""),
    (HEAD, b""),
    (HEAD + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n[".encode(), b" 408 "),
    (HEAD + b"Content-Length: 9\r\n\r\n", b" 401 "),
]


def test_slow_clients_are_hung_up_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SECONDS", "_NEXT_SECONDS", "_BODY_SECONDS"):
        monkeypatch.setattr(f"predictor_store.service.http.{name}", 0.3)
    with ExitStack() as all_of_them:
        slow = [all_of_them.enter_context(service.raw()) for _ in SLOW]
        for connected, (said, _) in zip(slow, SLOW, strict=True):
            connected.sendall(said)
        assert service.ask({"model": "one", "prompt": "x"})[0] == 200
        for connected, (_, heard) in zip(slow, SLOW, strict=True):
            told = b"".join(iter(lambda c=connected: c.recv(1 << 16), b""))
            assert heard in told[:20]
            assert bool(told) == bool(heard)
        monkeypatch.setattr("predictor_store.service.http._FIRST_SECONDS", 60)
        again = all_of_them.enter_context(service.raw())
        again.sendall(HEAD + b"Content-Length: 0\r\n\r\n")
        assert b" 401 " in again.recv(1 << 16)
        again.sendall(b"P")  # the head of a second request never ends
        assert b"HTTP" not in b"".join(iter(lambda: again.recv(1 << 16), b""))


def test_late_predictions_time_out_and_no_asker_stays(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = {"model": "one", "prompt": "x"}
    with monkeypatch.context() as patch:
        patch.setattr("predictor_store.service.http._ANSWER_SECONDS", 0.2)
        patch.setattr(service.worker, "step", lambda: [])
        status, told = service.ask(question)
    assert (status, json.loads(told)["error"]) == (503, "no prediction within 0.2 s")
    for most, status in ((1, 200), (1, 200), (0, 503)):
        monkeypatch.setattr("predictor_store.service.worker._MAX_CLIENTS", most)
        assert service.ask(question)[0] == status


class Frontend(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_example_of_the_page_tells_a_frontend_the_length(service: Service) -> None:
    ours = runpy.run_path(str(DOCS / "examples" / "dynamo_osl.py"))
    known = json.loads(service.ask({"model": "one", "prompt": PROMPT})[1])
    with HTTPServer(("127.0.0.1", 0), Frontend) as frontend:
        threading.Thread(target=frontend.serve_forever).start()
        for model, hints in (("one", {"osl": known["osl"]}), ("unknown", {})):
            chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
            at = f"127.0.0.1:{frontend.server_port}"
            heard = ours["ask"](chat, at, f"127.0.0.1:{service.port}", TOKEN)
            assert heard == {**chat, "nvext": {"agent_hints": hints}}
        frontend.shutdown()
