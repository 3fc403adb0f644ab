"""A service in a thread, over real sockets. No client notices the others' actions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from predictor_store.data.store_info import facts
from predictor_store.predict.model import ModelHistory, Stats, folder_of_model
from predictor_store.service import endpoint, messages
from predictor_store.service.client import PredictorClient
from predictor_store.service.endpoint import PredictorError
from predictor_store.service.link import Link, connect_worker
from predictor_store.service.messages import Finished, Lengths, News, Predict, Predicted
from predictor_store.service.server import Server
from predictor_store.service.worker import Worker
from predictor_store.store.file import StoreError
from predictor_store.store.store import Store
from sage_sched.app.address import Address
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig
from sage_sched.cli import main
from sage_sched.distribution import SOURCES, LengthDistribution
from tests.predictor_store.samples import greeted, share_of

TOKEN = "a token that is hard to guess"
PROMPT = "How high is the Zugspitze?"
_Kind = TypeVar("_Kind")


@pytest.fixture(autouse=True)
def _another_loop_is_preferred() -> Iterator[None]:
    """Prefer another event loop, like a process that has imported SGLang."""
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    yield
    asyncio.set_event_loop_policy(before)


@contextmanager
def served(config: SageConfig, token: str = "", *, by_model: bool = True) -> Iterator[Server]:
    router = endpoint.listen(Address.parse(config.predictor.service), token)
    with closing(Worker(config, by_model=by_model)) as worker:
        server = Server(worker, router)
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
        server.stop()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def config_at(folder: Path, service: str = "", **predictor: Any) -> SageConfig:
    service = service or str(folder / "service")
    store = StoreConfig(str(folder / "store"))
    return SageConfig(store, PredictorConfig(service=service, **predictor))


@pytest.fixture(params=["unix", "tcp"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SageConfig]:
    is_tcp = request.param == "tcp"
    monkeypatch.setenv(endpoint.TOKEN_VARIABLE, TOKEN)
    config = config_at(tmp_path, f"127.0.0.1:{free_port()}" if is_tcp else "")
    with served(config, TOKEN if is_tcp else ""):
        yield config


def until(
    link: Link, kind: type[_Kind], holds: Callable[[_Kind], bool] = lambda message: True
) -> _Kind:
    deadline_s = time.monotonic() + 600
    while time.monotonic() < deadline_s:
        for message in link.heard():
            if isinstance(message, kind) and holds(message):
                return message
        time.sleep(0.002)
    raise TimeoutError


def ask(link: Link, handle: int = 0, text: str = PROMPT, **more: Any) -> LengthDistribution:
    assert link.say(Predict(handle, text, **more))
    lengths = until(link, Predicted, lambda message: message.handle == handle).lengths
    assert lengths is not None
    return lengths.read()


def learn(link: Link, length: int) -> None:
    """Let the service learn 20 answers of this length."""
    ask(link)
    for _ in range(20):
        assert link.say(Finished(0, 5, length, censored=False))
    until(link, News, lambda news: news.stats.num_recorded >= 20)


def test_models_are_told_apart_and_clients_of_one_share(service: SageConfig) -> None:
    one, other, same = (connect_worker(service, name) for name in ("one", "../other", "one"))
    learn(one, 7)
    learn(other, 900)
    assert share_of(ask(same), 7) > 0.8
    assert share_of(ask(other), 900) > 0.8
    same.say(Finished(0, 5, 7, censored=False))
    for link in (one, other, same):
        link.close()
    store = service.store
    records = [facts(folder_of_model(store, name))["num_records"] for name in ("one", "../other")]
    assert records == [21, 20]
    # A refused store affects only its own model.
    damaged = folder_of_model(store, "damaged")
    Store(StoreConfig(str(damaged)), "another encoder", 3).close()
    with pytest.raises(StoreError, match="another encoder"):
        connect_worker(service, "damaged")
    connect_worker(service, "one").close()
    folders = {folder.parent for folder in Path(store.path).rglob("history.sqlite3")}
    assert folders == {folder_of_model(store, name) for name in ("one", "../other", "damaged")}
    assert folder_of_model(store, "x" * 10_000).name.isascii()


def test_no_client_waits_for_anothers_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.server._REPORT_SECONDS", 1e9)
    is_read = threading.Event()

    def slow(config: SageConfig) -> ModelHistory:
        assert "big" not in config.store.path or is_read.wait(60)
        return ModelHistory(config)

    monkeypatch.setattr("predictor_store.service.worker.ModelHistory", slow)
    config = config_at(tmp_path)
    with served(config), ThreadPoolExecutor() as threads:
        bigs = [threads.submit(connect_worker, config, "big") for _ in range(2)]
        small = connect_worker(config, "small")
        assert ask(small).source in SOURCES
        assert not any(big.done() for big in bigs)
        is_read.set()
        for link in (small, *(big.result() for big in bigs)):
            assert ask(link).source in SOURCES
            link.close()


def test_malformed_messages_of_one_do_not_touch_others(service: SageConfig) -> None:
    spoiler, other = (connect_worker(service, "one") for _ in range(2))
    for piece in (b"", b"junk", messages.encode(Predict(1, "x"))[:-1], b"\x91" * 50_000):
        spoiler._dealer.send(piece)
    spoiler._dealer.send_multipart([b"\x92", b"junk"])
    until(other, News, lambda news: news.stats.num_malformed == 5)
    spoiler._dealer.send(b"x" * (messages.MAX_BYTES + 1))
    spoiler.wait()  # it is hung up on
    ask(other)
    other.close()


# Fields of Asked.
JUNK: list[dict[str, object]] = [
    {"thinks": "yes"}, {"thinks": -2}, {"effort": 1.5}, {"other": 1}, {"num_tools": 2**40},
    {"max_tokens": True}, {"session": "x" * 201}, {"system": None},
]  # fmt: skip
MALFORMED: list[Any] = [
    Predict("1", "x"),  # type: ignore[arg-type]
    Predict(1, "x" * 4_001),
    Predict(1, "x", "y" * 1_001),
    *(Predict(1, "x", "", fields) for fields in JUNK),  # type: ignore[arg-type]
    Finished(1, -1, 1, False),
    Finished(1, 5, 2**31, False),
    Finished(1, 5, 1.5, False),  # type: ignore[arg-type]
    ["Finished", 1, 5],
]


@pytest.mark.parametrize("message", MALFORMED, ids=repr)
def test_a_malformed_message_is_refused(message: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages.decode_to_worker(messages.encode(message))


def test_a_silent_stranger_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_HANDSHAKE_MS", 50)
    config = config_at(tmp_path)
    with served(config), socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(config.predictor.service)
        while stranger.recv(1000):
            pass


def test_a_stuck_client_loses_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_HIGH_WATER_MARK", 10)
    config = config_at(tmp_path)
    with served(config):
        hung, other = (connect_worker(config, "one") for _ in range(2))
        num_said = 0
        for handle in range(3_000):
            while not hung.say(Predict(handle, "x")):
                ask(other)
            num_said += 1
        hung.say(Finished(2_999, 5, 7, censored=False))
        # It has read all messages, though the client has not got all answers.
        until(other, News, lambda news: news.stats.num_recorded == 1)
        assert sum(isinstance(message, Predicted) for message in hung.heard()) < num_said
        while not any(one.handle == -1 for one in hung.heard() if isinstance(one, Predicted)):
            hung.say(Predict(-1, "x"))  # until there is room for an answer again
        for link in (hung, other):
            link.close()


def test_another_version_gets_an_error_with_both_versions(
    service: SageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "predictor_store.service.link.Hello", lambda _, model: messages.Hello(99, model)
    )
    with pytest.raises(PredictorError, match=f"version 99 .* {messages.VERSION}:"):
        connect_worker(service, "one")


# Answers of other services to a Hello, and the errors of clients.
OTHERS: dict[str, tuple[Any, str]] = {
    "another version": (messages.Refused(99, "it speaks version 5, this 99", "version"), "this 99"),
    "junk": ("junk", "no predictor service"),
    "no welcome": (Predicted(1, None), "no predictor service"),
    "an odd prior": (messages.Welcome(5, Stats(1), Lengths([5], [], 1, "x")), "no predictor"),
    "a later one": (messages.Welcome(99, Stats(1), None), "no predictor"),
}


def saying(answer: Any) -> Callable[[Worker, bytes, str], None]:
    return lambda worker, client, _: worker._outgoing.append((client, answer))


@pytest.mark.parametrize(("answer", "said"), OTHERS.values(), ids=OTHERS)
def test_other_programs_are_told_apart_from_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    monkeypatch.setattr(Worker, "connect", saying(answer))
    config = config_at(tmp_path)
    with served(config), pytest.raises(PredictorError, match=said):
        connect_worker(config, "one", 60)


@contextmanager
def hung(config: SageConfig) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(config.predictor.service)
        listener.listen()
        yield


@pytest.mark.parametrize("state", ["down", "hung", "another version"])
def test_a_service_comes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr("predictor_store.service.supervisor._MAX_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr("predictor_store.service.client._SERVICE_PATIENCE_S", 0.5)
    config = config_at(tmp_path, deadline_ms=600_000)
    client = PredictorClient(config, "one")
    with contextlib.ExitStack() as until_it_is_there:
        if state == "hung":
            until_it_is_there.enter_context(hung(config))
            with pytest.raises(PredictorError, match="does not answer"):
                connect_worker(config, "one", 0.1)
        elif state == "another version":
            patch = until_it_is_there.enter_context(monkeypatch.context())
            patch.setattr(Worker, "connect", saying(OTHERS[state][0]))
            until_it_is_there.enter_context(served(config))
        client.start()
        found = asyncio.run(client.predict("Who is there?"))
        assert found.handle is None
        assert found.distribution is not None
        assert found.distribution.source == "prior"
    Path(config.predictor.service).unlink(missing_ok=True)
    with served(config), closing(client):
        while not client.stats()["worker_alive"]:
            time.sleep(0.01)
        assert asyncio.run(client.predict("Who is there?")).handle is not None
        assert client.stats()["num_worker_restarts"] == 0


def test_a_hurry_writes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's worker hurries after Ctrl-C."""
    monkeypatch.setattr("predictor_store.service.server._REPORT_SECONDS", 1e9)
    config = config_at(tmp_path)
    with served(config, by_model=False) as server, closing(connect_worker(config, "")) as link:
        ask(link)
        link.say(Finished(0, 5, 7, censored=False))
        server.hurry()  # earlier messages, and later ones
        link.say(Finished(0, 5, 8, censored=False))
        until(link, News, lambda news: news.stats.num_recorded == 2)
        assert facts(tmp_path / "store")["num_records"] == 2


def test_a_stopped_service_records_all_received_answers(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with closing(Worker(config)) as worker:
        greeted(worker, b"gone")
        for handle in range(30):  # more than one batch
            worker.receive(b"gone", Predict(handle, PROMPT * 30))
            worker.receive(b"gone", Finished(handle, 5, 7, censored=False))
        server = Server(worker, endpoint.listen(Address.parse(config.predictor.service)))
        server.stop()
        server.run()
    assert facts(tmp_path / "store")["num_records"] == 30


def test_a_lost_connection_counts_nothing_twice_and_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_CLIENTS", 1)
    monkeypatch.setattr("predictor_store.service.server._REPORT_SECONDS", 0.01)
    config = config_at(tmp_path, deadline_ms=600_000)
    with served(config), closing(PredictorClient(config, "one")) as client:
        client.start()
        while (handle := asyncio.run(client.predict(PROMPT)).handle) is None:
            time.sleep(0.01)
        client.finished(handle, 5, 7, False)
        while client.stats()["num_recorded"] == 0:
            asyncio.run(client.predict(PROMPT))  # hears the service's news
        time.sleep(0.1)
        asyncio.run(client.predict(PROMPT))  # hears news without a prior
        assert client.prior is not None
        assert client._link is not None
        client._link.kill()
        deadline_s = time.monotonic() + 600
        while not (client.stats()["num_worker_restarts"] and client.stats()["worker_alive"]):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert client.stats()["num_recorded"] == 1


def test_over_tcp_alone_a_token_is_asked_for(
    service: SageConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(endpoint.TOKEN_VARIABLE, "another, as long as that")
    if "/" in service.predictor.service:
        connect_worker(service, "one").close()
        return
    with pytest.raises(PredictorError, match="token"):
        connect_worker(service, "one")
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    named = replace(service.predictor, service_token_file=str(file))
    connect_worker(replace(service, predictor=named), "one").close()


def test_an_impostor_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows everything but the token."""
    monkeypatch.setenv(endpoint.TOKEN_VARIABLE, TOKEN)
    at = f"127.0.0.1:{free_port()}"
    with closing(endpoint.listen(Address.parse(at), "not the token, but as long")) as router:
        with pytest.raises(PredictorError, match="token"):
            connect_worker(SageConfig(predictor=PredictorConfig(service=at)), "my model")
        assert not router.poll(0)


def test_a_unix_socket_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "service"
    address = Address(path=str(path))
    router = endpoint.listen(address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    with pytest.raises(PredictorError, match="another service listens"):
        endpoint.listen(address)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        if os.getuid() == 0:  # sockets of root are used too
            endpoint.connect(address).close()
            os.chown(path, 2, -1)
        with pytest.raises(PermissionError, match="another user"):
            endpoint.connect(address)
    endpoint.close(router)
    assert not path.exists()
    left_dead(path)
    endpoint.close(endpoint.listen(address))
    path.write_text("a file of a person")
    with pytest.raises(PredictorError, match="not a socket"):
        endpoint.listen(address)
    with pytest.raises(PredictorError, match="cannot listen"):
        endpoint.listen(Address(path=str(tmp_path / ("x" * 200))))


def left_dead(path: Path) -> None:
    """Leave the socket of a killed service."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_one_of_two_services_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one starts while the first removes the socket of a killed one."""
    address = Address(path=str(tmp_path / "service"))
    left_dead(tmp_path / "service")
    unlink, others = Path.unlink, list[Future[Any]]()

    def unlink_late(path: Path) -> None:
        if not others:
            others.append(threads.submit(endpoint.listen, address))
            wait(others, timeout=0.3)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    with ThreadPoolExecutor() as threads, closing(endpoint.listen(address)):
        assert isinstance(others[0].exception(), PredictorError)


def test_bad_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("of two lines\nis none of ours")
    with pytest.raises(PredictorError, match="printable"):
        endpoint.token_of(PredictorConfig(service_token_file=str(tmp_path / "token")))
    monkeypatch.setenv(endpoint.TOKEN_VARIABLE, "x" * 16)
    assert endpoint.token_of(PredictorConfig()) == "x" * 16
    monkeypatch.setenv(endpoint.TOKEN_VARIABLE, "x" * 15)
    with pytest.raises(PredictorError, match=endpoint.TOKEN_VARIABLE):
        endpoint.token_of(PredictorConfig())
    with pytest.raises(PredictorError, match="service_token_file"):
        endpoint.token_of(PredictorConfig(service_token_file=str(tmp_path / "none")))
    monkeypatch.delenv(endpoint.TOKEN_VARIABLE)
    assert endpoint.token_of(PredictorConfig()) == ""
    for option in ("--listen", "--http"):
        assert main(["predictor", "serve", option, "127.0.0.1:1"]) == 2
        assert "needs a token" in capsys.readouterr().err
