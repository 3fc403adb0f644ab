"""Real workers in processes of their own. One is shared by the tests that leave it as it was."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from predictor_store.predict.asked import Asked
from predictor_store.predict.embedder import dimension, fingerprint
from predictor_store.service.client import PredictorClient
from predictor_store.store import lock
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig

# Long enough for any machine: only where the worker cannot answer is it waited out.
PATIENT = PredictorConfig(deadline_ms=60_000)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PredictorClient]:
    folder = tmp_path_factory.mktemp("store")
    client = PredictorClient(SageConfig(StoreConfig(str(folder)), PATIENT))
    # Started where a module lies about that must not be taken for Python's own.
    start = tmp_path_factory.mktemp("start")
    (start / "queue.py").write_text("raise ImportError('a stray module')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(start)
        client.start()
    yield client
    client.close()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def looped(*args: Any, **kw: Any) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kw), 300))

    return looped


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def pid_of(client: PredictorClient) -> int:
    assert client._link is not None
    assert client._link.process is not None
    return client._link.process.pid


@contextlib.contextmanager
def stopped(client: PredictorClient) -> Iterator[int]:
    """Its worker has stopped, and goes on afterwards if it still lives."""
    pid = pid_of(client)
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def lengths_on_disk(client: PredictorClient) -> list[int]:
    file = file_of(Path(client._config.store.path))
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as store:
        return [length for (length,) in store.execute("SELECT output_tokens FROM records")]


async def learned(client: PredictorClient, text: str, *lengths: int, **more: Any) -> int:
    """The handle of this prompt, whose answers have these lengths."""
    handle = (await client.predict(text, **more)).handle
    assert handle is not None
    for length in lengths:
        client.finished(handle, 5, length, False)
    return handle


async def share(client: PredictorClient, text: str, length: int, **more: Any) -> float:
    """Return the probability of this length in the prediction."""
    found = (await client.predict(text, **more)).distribution
    assert found is not None
    return float(found.weights[found.lengths == length].sum())


@in_loop
async def test_finished_answers_are_predicted(client: PredictorClient) -> None:
    before = client.stats()
    first = await learned(client, "How high is the Zugspitze?", *(40, 3000) * 10)
    second = await client.predict("How high is the Zugspitze?")
    assert second.handle not in (None, first)
    assert second.distribution is not None
    assert second.distribution.source == "history"
    for length in (40, 3000):
        assert await share(client, "How high is the Zugspitze?", length) > 0.4
    await until(lambda: client.stats()["num_recorded"] == before["num_recorded"] + 20)
    assert client.stats()["num_predicted_history"] == before["num_predicted_history"] + 3


def test_a_burst_is_predicted_and_recorded_whole(tmp_path: Path) -> None:
    """All in one turn of the event loop."""
    never_late = PredictorConfig(deadline_ms=600_000)
    client = PredictorClient(SageConfig(StoreConfig(str(tmp_path)), never_late))
    client.start()

    @in_loop
    async def main() -> None:
        prompts = [f"A burst has prompt {i}. " + "It is told at length. " * 20 for i in range(900)]
        order: list[int] = []

        async def ask(number: int) -> int:
            handle = await learned(client, prompts[number])
            order.append(number)
            return handle

        handles = await asyncio.gather(*map(ask, range(len(prompts))))
        assert order == [*range(len(prompts))]
        for handle in handles:
            client.finished(handle, 5, 50, False)
        await until(lambda: client.stats()["num_recorded"] == len(prompts))
        lost = "num_unsent", "num_dropped", "num_unrecorded", "num_deadline_misses"
        assert [client.stats()[name] for name in lost] == [0, 0, 0, 0]

    with contextlib.closing(client):
        main()


@in_loop
async def test_what_is_asked_beside_the_words_comes_along(client: PredictorClient) -> None:
    asked = Asked(session="a conversation")
    await learned(client, "And then?", *[777] * 4, asked=asked)
    in_session = await share(client, "List all birds of Peru.", 777, asked=asked)
    assert in_session > 0.1 + await share(client, "List all birds of Peru.", 777)


@in_loop
async def test_many_at_once_each_get_their_own(client: PredictorClient) -> None:
    lengths = {"Name the capital of Peru.": 3, "Write an essay on moss.": 900}
    for prompt, length in lengths.items():
        await learned(client, prompt, length, length)
    prompts = list(lengths) * 20
    own = await asyncio.gather(*(share(client, text, lengths[text]) for text in prompts))
    others = await asyncio.gather(*(share(client, text, 903 - lengths[text]) for text in prompts))
    assert min(own) > 0.35 > max(others)


def test_it_works_in_one_loop_after_another(client: PredictorClient) -> None:
    for _ in range(2):
        assert asyncio.run(client.predict("Again? \ud800")).handle is not None


@in_loop
async def test_a_cancelled_prediction_leaves_nothing_behind(client: PredictorClient) -> None:
    with stopped(client):  # or the answer could come first
        task = asyncio.ensure_future(client.predict("Cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not client._waiting
    assert (await client.predict("Not cancelled")).handle is not None


@in_loop
async def test_ctrl_c_is_not_for_the_worker(client: PredictorClient) -> None:
    pid = pid_of(client)
    os.kill(pid, signal.SIGINT)
    assert (await client.predict("Still there?")).handle is not None
    assert pid_of(client) == pid


@in_loop
async def test_a_hung_worker(client: PredictorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await learned(client, "Known before", 100)
    await until(lambda: client._prior is not None)
    before = client.stats()

    def wait_no_longer_than(deadline_ms: float) -> None:
        predictor = replace(client._config.predictor, deadline_ms=deadline_ms)
        monkeypatch.setattr(client, "_config", replace(client._config, predictor=predictor))

    with stopped(client):
        wait_no_longer_than(50)
        late = await client.predict("Too late")
        assert late.distribution is not None
        assert late.distribution.source == "prior"
        assert late.handle is not None
        assert client.stats()["num_deadline_misses"] == before["num_deadline_misses"] + 1
        # No request waits for it again until it has said something.
        wait_no_longer_than(600_000)
        at_once = await asyncio.wait_for(client.predict("At once"), 60)
        assert at_once == replace(late, handle=late.handle + 1)
        assert client.stats()["num_deadline_misses"] == before["num_deadline_misses"] + 2
        monkeypatch.undo()
        # More than is kept for the worker: nothing waits.
        full = late
        while full.handle is not None:  # the socket may have made room just then
            num_unrecorded = client.stats()["num_unrecorded"]
            while client.stats()["num_unrecorded"] == num_unrecorded:
                client.finished(10**9, 5, 100, False)
            full = await client.predict("No room")
        assert full.distribution == late.distribution
        assert client.stats()["num_unsent"] == before["num_unsent"] + 1
    # The handle of the late prediction is good once the worker has come to it.
    while (await client.predict("Room again?")).handle is None:
        await asyncio.sleep(0.05)
    await until(lambda: not client._is_silent)
    client.finished(late.handle, 5, 123, False)
    client.finished(late.handle, 5, 123, False)
    assert await share(client, "Too late", 123) > 0.35


@in_loop
async def test_a_killed_worker_costs_the_prediction_alone_and_comes_back(
    client: PredictorClient,
) -> None:
    first = await learned(client, "Before it died", 321, 321)
    before = client.stats()
    await until(lambda: lengths_on_disk(client).count(321) == 2)
    with stopped(client) as killed:
        waiting = [asyncio.ensure_future(client.predict("In flight")) for _ in range(5)]
        await until(lambda: len(client._waiting) == 5)
        assert not any(task.done() for task in waiting)
        os.kill(killed, signal.SIGKILL)
        for task in waiting:
            lost = await task
            assert lost.handle is None
            assert lost.distribution is not None
            assert lost.distribution.source == "prior"
    assert not client.stats()["worker_alive"]
    assert (await client.predict("Is it there?")).handle is None
    client.finished(first, 5, 321, False)

    await until(lambda: bool(client.stats()["worker_alive"]))
    assert pid_of(client) != killed
    assert await share(client, "Before it died", 321) > 0.35
    after = client.stats()
    assert after["num_worker_restarts"] == before["num_worker_restarts"] + 1
    assert after["num_recorded"] >= before["num_recorded"]
    assert after["num_unrecorded"] == before["num_unrecorded"] + 1
    # Its handle went with the old worker.
    await learned(client, "Before it died", 321)
    client.finished(first, 5, 321, False)
    await until(lambda: client.stats()["num_unrecorded"] == before["num_unrecorded"] + 2)


def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    client = PredictorClient(SageConfig(StoreConfig(str(tmp_path)), PATIENT))
    client.start()
    found = asyncio.run(client.predict("Last words"))
    assert found.handle is not None
    assert found.distribution is not None  # an empty store knows of lengths in general
    assert found.distribution.source == "general"
    client.finished(found.handle, 5, 12, True)
    client.close()
    with Store(client._config.store, fingerprint(), dimension()) as store:
        (kept,) = store.load()
    assert (kept.output_tokens, kept.censored) == (12, True)
    client.finished(0, 5, 1, False)
    assert not client.stats()["worker_alive"]
    assert asyncio.run(client.predict("Closed")).handle is None


SERVER = """
import sys, time
from predictor_store.service.client import PredictorClient
from sage_sched.app.config import SageConfig, StoreConfig
client = PredictorClient(SageConfig(StoreConfig(sys.argv[1])))
client.start()
print("ready", flush=True)
time.sleep(600)
"""


def test_the_worker_goes_when_the_server_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        assert lock.holder(tmp_path) is not None
        server.kill()
    while lock.holder(tmp_path) is not None:  # the timeout of the test ends it
        time.sleep(0.05)
