"""Running requests yield on a real server, and what they say is what they would have said."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.exactness import STRICT, Spoken, ask, compare
from bench.model import write_model
from bench.policy_server import CPU_ENV
from bench.server import Server
from tests.engine.serving import (
    LONG_PROMPT,
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
    warmed_store,
)

NUM_REQUESTS = 80
# Room for three or four requests, and a plan that changes its mind all the time.
FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "6"]
RESTLESS = """
[policy]
bucket_tokens = 8
preempt_margin = 0.0
aging_pools = 1000.0
[preemption]
enabled = true
max_yields = 50
"""
CHECKED = CPU_ENV | STRICT


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_store(tmp_path_factory.mktemp("warmed") / "store")


def crowd(seed: int = 0) -> list[tuple[str, int]]:
    """Prompts and how many tokens each is to get, in an order that no policy would choose."""
    rng = random.Random(seed)
    long = [(f"{LONG_PROMPT} Chapter {i}.", rng.randrange(60, 200)) for i in range(NUM_REQUESTS)]
    short = [(f"{SHORT_PROMPT} Case {i}.", rng.randrange(4, 20)) for i in range(NUM_REQUESTS)]
    return [pair for both in zip(long, short, strict=True) for pair in both][:NUM_REQUESTS]


def answers(server: Server, asked: Sequence[tuple[str, int]]) -> list[Spoken]:
    """Of all asked at once, their lengths known only as caps."""
    return ask(server, asked, 24, sampling=[{"ignore_eos": False}])


@pytest.fixture(scope="module")
def calm_answers(
    model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Spoken]:
    """What the crowd is told where nobody yields."""
    folder = tmp_path_factory.mktemp("calm")
    copy = Path(shutil.copytree(store, folder / "store"))
    settings = "[preemption]\nenabled = false\n"
    with SageServer(model, folder, copy, flags=FLAGS, env=CPU_ENV, settings=settings) as server:
        found = answers(server, crowd())
        assert server.stats()["preemption"] is None
    return found


def check_the_same(server: SageServer, calm: list[Spoken]) -> None:
    found = answers(server, crowd())
    stats = server.stats()["preemption"]
    assert stats["num_yields"] == stats["num_resumed"] >= NUM_REQUESTS / 3
    num_different, largest = compare(calm, found)
    assert num_different == 0
    assert largest < 1e-4  # requests that are decoded together round one another's last digits


# For the tests of one class, so that it is gone when the next one starts.
@pytest.fixture(scope="class")
def paged(
    model: Path,
    store: Path,
    calm_answers: list[Spoken],  # made by a server that is gone by now
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SageServer]:
    folder = tmp_path_factory.mktemp("paged")
    copy = Path(shutil.copytree(store, folder / "store"))
    flags = [*FLAGS, "--page-size", "16", "--disable-overlap-schedule"]
    with SageServer(model, folder, copy, flags=flags, env=CHECKED, settings=RESTLESS) as server:
        yield server


class TestPagesOf16WithoutOverlap:
    def test_answers_are_the_same(self, paged: SageServer, calm_answers: list[Spoken]) -> None:
        check_the_same(paged, calm_answers)

    def test_what_is_counted_in_an_answer_goes_on_where_it_was(self, paged: SageServer) -> None:
        asked = [(prompt, max(num_tokens, 60)) for prompt, num_tokens in crowd(seed=5)[:25]]
        counting = [
            {"frequency_penalty": 1.5},
            {"presence_penalty": 1.5},
            {"repetition_penalty": 1.5},
            # Until then no token may end the answer, after it one in eight does.
            {
                "min_new_tokens": 40,
                "ignore_eos": False,
                "stop_token_ids": list(range(0, 16384, 8)),
            },
            {},
        ]
        alone = ask(paged, asked, 1, sampling=counting)
        found = ask(paged, asked, 24, sampling=counting)
        assert compare(alone, found)[0] == 0
        yielded = {i % 5 for i, answer in enumerate(found) if answer.num_retractions}
        assert len(yielded & set(range(4))) >= 2  # which ones do is a matter of timing
        # The demand is one that can fail: each kind of counting changes what is said.
        plain = ask(paged, asked, 1)
        changed = {i % 5 for i in range(25) if alone[i].ids != plain[i].ids}
        assert changed == set(range(4))


def test_latent_kv_comes_back_as_it_went(store: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", latent_attention=True)
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    with SageServer(model, tmp_path, copy, flags=FLAGS, env=CHECKED, settings=RESTLESS) as server:
        asked = crowd(seed=6)[:30]
        found = answers(server, asked)
        assert server.stats()["preemption"]["num_resumed"] > 0
        alone = ask(server, asked, 1, sampling=[{"ignore_eos": False}])
        assert compare(alone, found)[0] == 0


def test_a_full_host_pool_lets_requests_run_on(model: Path, store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    settings = RESTLESS + "host_pool_gib = 0.00005\nswap_only = true\n"
    with SageServer(model, tmp_path, copy, flags=FLAGS, env=CHECKED, settings=settings) as server:
        asked = crowd(seed=3)[:30]
        found = answers(server, asked)
        assert [len(answer.ids) for answer in found] == [num_tokens for _, num_tokens in asked]
        assert server.stats()["preemption"]["num_without_host_room"] > 0


def test_kv_that_no_host_memory_takes_is_left_in_the_tree(
    model: Path, store: Path, tmp_path: Path, calm_answers: list[Spoken]
) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    settings = RESTLESS + "host_pool_gib = 0.00005\n"
    with SageServer(model, tmp_path, copy, flags=FLAGS, env=CHECKED, settings=settings) as server:
        found = answers(server, crowd())
        assert server.stats()["preemption"]["num_left_in_tree"] > 0
    assert compare(calm_answers, found)[0] == 0


# From here on one server; not before, as an idle one takes a core from those beside it.
@pytest.fixture(scope="module")
def restless(
    model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SageServer]:
    folder = tmp_path_factory.mktemp("restless")
    copy = Path(shutil.copytree(store, folder / "store"))
    with SageServer(model, folder, copy, flags=FLAGS, env=CHECKED, settings=RESTLESS) as server:
        yield server


def test_an_answer_is_the_same_whoever_it_yielded_to(
    restless: SageServer, calm_answers: list[Spoken]
) -> None:
    check_the_same(restless, calm_answers)


def test_a_client_that_leaves_takes_nothing_along(restless: SageServer) -> None:
    asked = crowd(seed=1)[:40]
    before = restless.stats()["preemption"]["num_yields"]

    def ask(position: int) -> int | None:
        prompt, num_tokens = asked[position]
        if position % 4:
            return len(generate(restless, prompt, num_tokens)["output_ids"])
        body = {
            "text": prompt,
            "sampling_params": {"max_new_tokens": num_tokens, "temperature": 0},
            "stream": True,
        }
        with requests.post(restless.url + "/generate", json=body, stream=True, timeout=60) as left:
            next(left.iter_lines())
            time.sleep(0.05 * (position % 7))  # some are running when they leave, some swapped
        return None

    with ThreadPoolExecutor(24) as pool:
        counts = list(pool.map(ask, range(len(asked))))
    for position, count in enumerate(counts):
        assert count in (None, asked[position][1])
    assert restless.stats()["preemption"]["num_yields"] > before
    # SGLang checks on idle that no memory is held any more, and dies where some is.
    wait_until(lambda: requests.get(restless.url + "/health", timeout=30).status_code == 200)
    assert answers(restless, asked[:1])[0].ids


def test_what_a_flush_makes_stale_is_computed_again(restless: SageServer) -> None:
    asked = crowd(seed=2)[:30]
    alone = ask(restless, asked, 1, sampling=[{"ignore_eos": False}])
    recomputed = 0
    with ThreadPoolExecutor(1) as background:
        together = background.submit(answers, restless, asked)
        while not together.done() and not recomputed:
            time.sleep(0.3)
            post(restless, "/pause_generation", {"mode": "retract"})
            post(restless, "/flush_cache", {})
            post(restless, "/continue_generation", {})
            recomputed = restless.stats()["preemption"]["num_recomputed"]
        assert compare(alone, together.result())[0] == 0
    assert recomputed > 0


def post(server: Server, path: str, body: dict[str, Any]) -> None:
    requests.post(server.url + path, json=body, timeout=60).raise_for_status()
