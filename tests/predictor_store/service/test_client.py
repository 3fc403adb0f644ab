"""Real workers in processes of their own. Tests that leave a worker unchanged share it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvloop

from predictor_store.predict.asked import Asked, Scope
from predictor_store.predict.embedder import dimension, fingerprint
from predictor_store.service.client import PredictorClient
from predictor_store.store import lock
from predictor_store.store.store import Store
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig
from tests.predictor_store.samples import share_of

# Long enough for any machine. A test waits this long only if the worker cannot answer.
PATIENT = PredictorConfig(deadline_ms=60_000)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PredictorClient]:
    folder = tmp_path_factory.mktemp("store")
    client = PredictorClient(SageConfig(StoreConfig(str(folder)), PATIENT))
    # Its folder has a module that must not be mistaken for Python's own.
    start = tmp_path_factory.mktemp("start")
    (start / "queue.py").write_text("raise ImportError('a stray module')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(start)
        client.start()
    yield client
    client.close()


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
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
    """Stop its worker for a block. Afterwards the worker goes on, if it still lives."""
    pid = pid_of(client)
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def waiting_for(client: PredictorClient, deadline_ms: float) -> SageConfig:
    predictor = replace(client._config.predictor, deadline_ms=deadline_ms)
    return replace(client._config, predictor=predictor)


def lengths_on_disk(client: PredictorClient) -> list[int]:
    config = replace(client._config.store, on_disk=False)
    with Store(config, fingerprint(), dimension()) as store:
        return [record.output_tokens for record in store.load()]


async def learned(client: PredictorClient, text: str, *lengths: int, **more: Any) -> int:
    """Return the handle of this prompt, whose answers have these lengths."""
    handle = (await client.predict(text, **more)).handle
    assert handle is not None
    for length in lengths:
        client.finished(handle, 5, length, False)
    return handle


async def share(client: PredictorClient, text: str, length: int, **more: Any) -> float:
    return share_of((await client.predict(text, **more)).distribution, length)


def added(client: PredictorClient, before: dict[str, Any], *names: str) -> list[int]:
    return [client.stats()[f"num_{name}"] - before[f"num_{name}"] for name in names]


@in_loop
async def test_each_prompt_gets_a_prediction_from_its_answers(client: PredictorClient) -> None:
    before = client.stats()
    lengths = {"Name the capital of Peru.": 3, "Write an essay on moss.": 900}
    handles = [await learned(client, text, *[of, 40] * 9) for text, of in lengths.items()]
    order: list[int] = []

    async def own(number: int) -> float:
        text = list(lengths)[number % 2]
        found = await share(client, text, lengths[text])
        order.append(number)
        return found - await share(client, text, 903 - lengths[text])

    assert min(await asyncio.gather(*map(own, range(300)))) > 0.35
    assert order == [*range(300)]
    # The session and the scope reach the worker too.
    asked = Asked(session="a conversation")
    handles.append(await learned(client, "And then?", *[777] * 4, asked=asked, scope="x" * 2_000))
    in_session = await share(client, "List all birds of Peru.", 777, asked=asked)
    assert in_session > 0.1 + await share(client, "List all birds of Peru.", 777)
    assert len({*handles}) == 3
    # Answers that a client stops, and answers that go on, would have been longer.
    handle = await learned(client, "Count to nine.", 9, scope=Scope("", "a stop").name)
    client.finished(handle, 5, 2, False, stopped=True)
    assert await share(client, "Count to nine.", 2) < 0.01
    client.goes_on(await learned(client, "Count to 5,000."), 3, 5_000)
    found = (await client.predict("Count to 5,000.")).distribution
    assert found is not None
    assert found.mean() > 1_000
    await until(lambda: added(client, before, "recorded", "going_on") == [42, 1])
    sources = (f"predicted_{source}" for source in ("history", "warm", "general"))
    assert sum(added(client, before, *sources)) == 609
    lost = "unsent", "dropped", "unrecorded", "deadline_misses"
    assert added(client, before, *lost) == [0, 0, 0, 0]


@in_loop
async def test_a_cancelled_prediction_leaves_nothing_behind(client: PredictorClient) -> None:
    with stopped(client) as pid:  # otherwise the answer could come first
        task = asyncio.ensure_future(client.predict("Cancelled"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert client.stats()["num_awaited"] == 0
    os.kill(pid, signal.SIGINT)  # the worker ignores Ctrl-C
    assert (await client.predict("Not cancelled")).handle is not None
    assert pid_of(client) == pid


@in_loop
async def test_a_hung_worker(client: PredictorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await learned(client, "Known before", 100)
    before, prior = client.stats(), client.prior
    await learned(client, "Known before", *[100] * 99)
    await until(lambda: client.prior != prior)

    with stopped(client):
        monkeypatch.setattr(client, "_config", waiting_for(client, 50))
        late = await client.predict("Too late")
        assert late.distribution is not None
        assert (late.distribution.source, late.handle is None) == ("prior", False)
        assert added(client, before, "deadline_misses") == [1]
        # No request waits for the worker again until it sends something.
        monkeypatch.setattr(client, "_config", waiting_for(client, 600_000))
        at_once = await asyncio.wait_for(client.predict("At once"), 60)
        assert at_once == replace(late, handle=late.handle + 1)
        assert added(client, before, "deadline_misses") == [2]
        monkeypatch.undo()
        # More messages than are kept for the worker. Nothing waits.
        full = late
        while full.handle is not None:  # the socket may just have made room
            num_unrecorded = client.stats()["num_unrecorded"]
            while client.stats()["num_unrecorded"] == num_unrecorded:
                client.finished(10**9, 5, 100, False)
            full = await client.predict("No room")
        assert full.distribution == late.distribution
        assert added(client, before, "unsent") == [1]
    # The handle of the late prediction is valid once the worker has reached it.
    while (await client.predict("Room again?")).handle is None:
        await asyncio.sleep(0.05)
    await until(lambda: not client._is_silent)
    client.finished(late.handle, 5, 123, False)
    client.finished(late.handle, 5, 123, False)
    assert await share(client, "Too late", 123) > 0.35


@in_loop
async def test_a_killed_worker_costs_the_prediction_alone_and_comes_back(
    client: PredictorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await learned(client, "Before it died", 321, 321)
    await until(lambda: lengths_on_disk(client).count(321) == 2)
    await client.predict("Its news come before this")
    before = client.stats()
    with stopped(client) as killed:
        waiting = [asyncio.ensure_future(client.predict("In flight")) for _ in range(5)]
        await until(lambda: client.stats()["num_awaited"] == 5)
        monkeypatch.setattr(client, "_config", waiting_for(client, 1))
        await client.predict("Too late")
        monkeypatch.undo()
        os.kill(killed, signal.SIGKILL)
        for lost in await asyncio.gather(*waiting):
            assert (lost.handle, lost.distribution) == (None, client.prior)
    assert not client.stats()["worker_alive"]
    assert (await client.predict("Is it there?")).handle is None
    client.finished(first, 5, 321, False)

    await until(lambda: bool(client.stats()["worker_alive"]))
    assert pid_of(client) != killed
    assert await share(client, "Before it died", 321) > 0.35
    names = "worker_restarts", "unrecorded", "unsent", "recorded", "deadline_misses"
    assert added(client, before, *names) == [1, 1, 1, 0, 1]
    # Its handle was lost with the old worker.
    await learned(client, "Before it died", 321)
    client.finished(first, 5, 321, False)
    await until(lambda: added(client, before, "unrecorded") == [2])


def test_closing_writes_remaining_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = PredictorClient(SageConfig(StoreConfig(str(tmp_path)), PATIENT))
    client.start()
    # The predictions take 1, 3, 5 ... 13 s.
    clock = SimpleNamespace(perf_counter=itertools.accumulate(range(20)).__next__)
    monkeypatch.setattr("predictor_store.service.client.time", clock)
    num_open = []
    for text in ("\ud800", *["And then?"] * 5, "Last words" * 1000):  # each in a loop of its own
        found = asyncio.run(client.predict(text))
        num_open.append(psutil.Process().num_fds())
    assert num_open[0] == num_open[-1]
    latencies = [client.stats()[f"prediction_latency_{of}_ms"] for of in ("p50", "p99")]
    assert latencies == pytest.approx([7_000, 12_880])
    assert found.handle is not None
    assert found.distribution is not None  # an empty store knows general lengths
    assert found.distribution.source == "general"
    client.finished(found.handle, 5, 12, True)
    client.close()
    with Store(client._config.store, fingerprint(), dimension()) as store:
        (kept,) = store.load()
    assert (kept.output_tokens, kept.input_tokens, kept.censored) == (12, 5, True)
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
