"""Preemption broken on purpose, on one server: what a client sees of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.exactness import STRICT, TWO_RANKS, Spoken, ask, compare, crowd
from bench.policy_server import CPU_ENV
from bench.server import ServerError
from tests.engine import saboteur
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, wait_until, warmed_store

ASKED = crowd(36)
AT_A_TIME = 18
FLAGS = [
    # Requests yield most often under this one: every time that their age has doubled.
    "--schedule-policy", "fastserve", "--max-total-tokens", "640", "--max-running-requests", "6",
]  # fmt: skip
SETTINGS = """
[policy]
bucket_tokens = 2
mlfq_quantum_ms = 6.0
[preemption]
enabled = true
max_yields = 1000
[step_time]
decode_base_ms = 6.0
prefill_base_ms = 6.0
prefill_token_ms = 0.0
"""
CHECKED = CPU_ENV | STRICT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sabotaged")
    warmed_store(folder / "store")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, folder: Path) -> Iterator[SageServer]:
    env = CHECKED | saboteur.install(folder / "plugin")
    with SageServer(
        model, folder, folder / "store", flags=FLAGS, env=env, settings=SETTINGS
    ) as server:
        yield server


@pytest.fixture(scope="module")
def alone(server: SageServer) -> list[Spoken]:
    """What each is told with no one else there, so that none yields."""
    before = counters(server)["num_yields"]
    found = ask(server, ASKED, 1)
    assert counters(server)["num_yields"] == before
    return found


@pytest.fixture
def order(folder: Path, server: SageServer) -> Iterator[Callable[[str], Any]]:
    """Gives the saboteur an order for one test; what it spoilt in the radix cache goes too."""
    orders = saboteur.orders_file(folder / "plugin")
    yield orders.write_text
    orders.write_text(saboteur.NOTHING)
    wait_until(lambda: requests.post(f"{server.url}/flush_cache", timeout=60).ok)


def counters(server: SageServer) -> dict[str, int]:
    found: dict[str, int] = server.stats()["preemption"]
    return found


def test_unbroken_nothing_differs(server: SageServer, alone: list[Spoken]) -> None:
    before = counters(server)["num_yields"]
    found = ask(server, ASKED, AT_A_TIME)
    assert counters(server)["num_yields"] - before >= len(ASKED)
    num_different, largest = compare(alone, found)
    assert num_different == 0
    assert largest < 1e-3
    assert counters(server)["copies_alive"] == 0


def test_kv_that_does_not_come_back_is_noticed(
    server: SageServer, alone: list[Spoken], order: Callable[[str], Any]
) -> None:
    # The other tests' demand is one that can fail.
    order(saboteur.SKIP_RESTORE)
    num_different, _ = compare(alone, ask(server, ASKED, AT_A_TIME))
    assert num_different > 5


def test_where_the_copy_fails_a_request_goes_on(
    server: SageServer, alone: list[Spoken], order: Callable[[str], Any]
) -> None:
    before = counters(server)
    order(saboteur.FAIL_BACKUP)
    found = ask(server, ASKED, AT_A_TIME)
    after = counters(server)
    assert compare(alone, found)[0] == 0
    assert server.log.read_text().count("it goes on running") > 3
    assert after["num_yields"] > before["num_yields"]
    assert after["num_recomputed"] == before["num_recomputed"]


def test_where_copying_back_fails_a_request_is_computed_again(
    server: SageServer, alone: list[Spoken], order: Callable[[str], Any]
) -> None:
    before = counters(server)
    order(saboteur.FAIL_RESTORE)
    found = ask(server, ASKED, AT_A_TIME)
    after = counters(server)
    assert compare(alone, found)[0] == 0
    num_recomputed = after["num_recomputed"] - before["num_recomputed"]
    assert num_recomputed > 3
    num_resumed = after["num_resumed"] - before["num_resumed"]
    assert num_resumed + num_recomputed == after["num_yields"] - before["num_yields"]


def test_a_stream_has_no_gap_and_no_repeat(server: SageServer, alone: list[Spoken]) -> None:
    before = counters(server)["num_yields"]

    def stream(i: int) -> tuple[str, list[int]]:
        """The text of the deltas, and their token counts where the server sends them."""
        prompt, num_tokens = ASKED[i]
        text, counts = "", []
        if i % 2:
            path, key = "/v1/completions", "max_tokens"
            body: dict[str, Any] = {"model": "any", "prompt": prompt, "ignore_eos": True}
            body |= {"temperature": 0, key: num_tokens}
        else:
            path = "/generate"
            sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
            body = {"text": prompt, "sampling_params": sampling}
        with requests.post(
            server.url + path, json=body | {"stream": True}, stream=True, timeout=300
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if i % 2:
                    text += chunk["choices"][0]["text"]
                else:
                    assert chunk["text"].startswith(text)
                    text = chunk["text"]
                    counts.append(chunk["meta_info"]["completion_tokens"])
        return text, counts

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        streamed = list(pool.map(stream, range(len(ASKED))))
    assert counters(server)["num_yields"] - before >= len(ASKED)
    assert [text for text, _ in streamed] == [answer.text for answer in alone]
    for (_, counts), (_, num_tokens) in zip(streamed[::2], ASKED[::2], strict=True):
        assert counts == sorted(counts)  # a retracted token makes a chunk with nothing new
        assert counts[-1] == num_tokens


def test_the_copy_goes_with_the_client(server: SageServer) -> None:
    before = counters(server)
    long = [(f"{prompt} At length.", 400) for prompt, _ in ASKED[:12]]

    def leave(i: int) -> None:
        prompt, num_tokens = long[i]
        with contextlib.suppress(requests.RequestException):  # the answer to an abort
            generate(server, prompt, num_tokens, rid=f"leaver-{i}")

    with ThreadPoolExecutor(len(long)) as pool:
        leaving = [pool.submit(leave, i) for i in range(len(long))]
        wait_until(lambda: counters(server)["copies_alive"] >= 2)
        for i in range(len(long)):
            body = {"rid": f"leaver-{i}"}
            requests.post(f"{server.url}/abort_request", json=body, timeout=60).raise_for_status()
        for future in leaving:
            future.result()
    generate(server, SHORT_PROMPT)  # the last batch of a server is let go with the next
    wait_until(lambda: counters(server)["copies_alive"] == 0)
    after = counters(server)
    came_back = sum(after[name] - before[name] for name in ("num_resumed", "num_recomputed"))
    assert after["num_yields"] - before["num_yields"] > came_back


def test_killed_with_requests_swapped_it_starts_again_on_its_store(
    server: SageServer, model: Path, folder: Path, tmp_path: Path
) -> None:
    # Last of those that share a server, as it takes it away.
    before = server.history()

    def ask_a_dying_server(i: int) -> None:
        with pytest.raises((ServerError, requests.RequestException)):
            ask(server, [(f"{ASKED[i][0]} At length.", 400)], 1)

    with ThreadPoolExecutor(12) as pool:
        asking = [pool.submit(ask_a_dying_server, i) for i in range(12)]
        wait_until(lambda: counters(server)["copies_alive"] >= 2)
        assert server.pid is not None
        os.killpg(server.pid, signal.SIGKILL)
        for future in asking:
            future.result()

    wait_until(lambda: not server.running())
    with SageServer(
        model, tmp_path, folder / "store", flags=FLAGS, env=CHECKED, settings=SETTINGS
    ) as again:
        kept = again.history()
        assert kept[: len(before)] == before
        generate(again, SHORT_PROMPT)
        wait_until(lambda: len(again.history()) == len(kept) + 1)


def test_where_the_copy_fails_on_one_rank_the_request_goes_on_on_both(
    model: Path, tmp_path: Path
) -> None:
    env = CHECKED | TWO_RANKS | saboteur.install(tmp_path / "plugin")
    store = warmed_store(tmp_path / "store")
    flags = [*FLAGS, "--tp-size", "2"]
    saboteur.orders_file(tmp_path / "plugin").write_text(saboteur.FAIL_BACKUP_ON_ONE_RANK)
    with SageServer(model, tmp_path, store, flags=flags, env=env, settings=SETTINGS) as server:
        together = ask(server, ASKED, AT_A_TIME)
        assert counters(server)["num_yields"] > 3
        assert server.log.read_text().count("it goes on running") > 3
        assert compare(ask(server, ASKED, 1), together)[0] == 0
