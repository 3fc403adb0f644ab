"""One predictor for several processes: HTTP workers of one server, and two servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests

from bench.engines.server.server import Server
from predictor_store.data.warm import Observation, warm_store
from predictor_store.predict.model import folder_of_model
from predictor_store.service import endpoint
from sage_sched.app.config import StoreConfig
from tests.engine.kinds import BIN, CHECKED, PATIENT, settings
from tests.engine.serving import (
    LONG_PROMPT,
    SEVERAL_HTTP_PROCESSES,
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
)


def predictor_of(server: Server) -> dict[str, Any]:
    info = requests.get(f"{server.url}/server_info", timeout=300).json()
    found: dict[str, Any] = info["internal_states"][0]["sage"]["predictor"]
    return found


@SEVERAL_HTTP_PROCESSES
def test_several_http_processes_share_one_worker(several: SageServer) -> None:
    server = several
    settings(server, {"schedule_policy": "sage"})
    num_before = len(server.history())  # of SGLang's own requests
    with ThreadPoolExecutor(16) as pool:
        prompts = [SHORT_PROMPT, LONG_PROMPT] * 16
        answers = list(pool.map(lambda prompt: generate(server, prompt, 3), prompts))
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [3] * 32
    wait_until(lambda: len(server.history()) >= num_before + 32)
    ranked = server.stats()["num_ranked"]
    assert ranked.get("warm", 0) + ranked.get("history", 0) >= 32
    # Each has predicted some, and what either learns both have.
    seen: dict[int, int] = {}

    def both_were_asked() -> bool:
        found = predictor_of(server)
        seen[found["http_process"]] = found["num_recorded"]
        return len(seen) == 2 and min(seen.values()) >= 32

    wait_until(both_were_asked)

    worker = server.predictor_worker()
    no_abort_is_lost_whichever_process_it_comes_to(server, worker)

    # The worker is killed: no request waits for it, and it comes back for both.
    worker.kill()
    answers = [generate(server, SHORT_PROMPT, 3) for _ in range(4)]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [3] * 4
    seen.clear()

    def both_are_back() -> bool:
        found = predictor_of(server)
        seen[found["http_process"]] = found["worker_alive"]
        return len(seen) == 2 and min(seen.values()) == 1

    wait_until(both_are_back)
    num_before = len(server.history())
    for _ in range(8):
        generate(server, SHORT_PROMPT, 3)
    wait_until(lambda: len(server.history()) >= num_before + 8)
    assert server.stats()["num_policy_errors"] == 0


def no_abort_is_lost_whichever_process_it_comes_to(server: Server, worker: psutil.Process) -> None:
    """Though it comes while the predictions of its requests are awaited, and as often as not to
    another process than theirs."""
    rids = [f"awaited-{number}" for number in range(12)]
    awaited: dict[int, int] = {}

    def all_are_awaited() -> bool:
        found = predictor_of(server)
        awaited[found["http_process"]] = found["num_awaited"]
        return sum(awaited.values()) == len(rids)

    worker.suspend()
    try:
        with ThreadPoolExecutor(len(rids)) as pool:
            asked = [pool.submit(generate, server, SHORT_PROMPT, 200, rid=rid) for rid in rids]
            wait_until(all_are_awaited)
            for rid in rids:
                body = {"rid": rid}
                requests.post(f"{server.url}/abort_request", json=body, timeout=300)
            worker.resume()
            for answer in asked:
                meta = answer.result()["meta_info"]
                assert meta["finish_reason"]["type"] == "abort"
                assert meta["completion_tokens"] <= 1
    finally:
        worker.resume()


TOKEN = "a token that is hard to guess"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def service(folder: Path, address: str, port: int) -> Iterator[subprocess.Popen[str]]:
    config = folder / "service.toml"
    config.write_text(f'[store]\npath = "{folder / "store"}"\n')
    with subprocess.Popen(
        [
            str(BIN / "sage-sched"),
            *f"predictor serve --listen {address} --http 127.0.0.1:{port}".split(),
            "--sage-config",
            str(config),
        ],
        stdout=subprocess.PIPE,
        env=os.environ | {endpoint.TOKEN_VARIABLE: TOKEN},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert address in process.stdout.readline()
            yield process
        finally:
            process.terminate()


DYING = """
import asyncio, os, sys
from predictor_store.service.client import PredictorClient
from sage_sched.app.config import PredictorConfig, SageConfig
client = PredictorClient(SageConfig(predictor=PredictorConfig(service=sys.argv[1])), "mid")
client.start()
async def main():
    asked = [asyncio.ensure_future(client.predict("I die")) for _ in range(100)]
    await asyncio.sleep(0)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""


def asked(server: Server, prompts: Sequence[str]) -> list[int]:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: generate(server, prompt, 3), prompts))
    return [answer["meta_info"]["completion_tokens"] for answer in answers]


def median(port: int, model: str) -> int:
    """The predicted length of an answer, by the HTTP of the service."""
    url, headers = f"http://127.0.0.1:{port}/predict", {"Authorization": f"Bearer {TOKEN}"}
    body = {"model": model, "prompt": SHORT_PROMPT}
    found = requests.post(url, json=body, headers=headers, timeout=300).json()
    return int(found["quantiles"]["0.5"])


def test_two_servers_on_one_service(model: Path, tmp_path: Path) -> None:
    address, port = str(tmp_path / "predictor.socket"), free_port()
    store = StoreConfig(str(tmp_path / "store"))
    for name, length in (("short", 4), ("long", 700)):
        lengths = [Observation(SHORT_PROMPT, length) for _ in range(40)]
        warm_store(folder_of_model(store, name), lengths, StoreConfig())
    by_service = f'{PATIENT}service = "{address}"\n'

    def server(name: str) -> SageServer:
        folder = tmp_path / name
        folder.mkdir()
        flags = ["--served-model-name", name]
        return SageServer(
            model, folder, folder / "unused", flags=flags, env=CHECKED, settings=by_service
        )

    with server("short") as short:
        # There is no service yet. It serves all the same, and finds it by itself.
        assert asked(short, [SHORT_PROMPT] * 4) == [3] * 4
        assert predictor_of(short)["num_predicted_prior"] >= 4
        with service(tmp_path, address, port) as serving, server("long") as long:
            wait_until(lambda: predictor_of(short)["worker_alive"] == 1)
            num_alone = predictor_of(short)["num_predicted_prior"]
            # None is predicted from the other's answers.
            assert 0 <= median(port, "short") <= 10
            assert 600 <= median(port, "long") <= 800
            # A client dies with a hundred questions open.
            died = subprocess.run([sys.executable, "-c", DYING, address], check=False)
            assert died.returncode == -signal.SIGKILL
            for each in (short, long):
                assert asked(each, [SHORT_PROMPT] * 8) == [3] * 8
                wait_until(lambda each=each: predictor_of(each)["num_recorded"] == 8)
            with socket.socket(socket.AF_UNIX) as junk:
                junk.connect(address)
                junk.sendall(b"\xff\x00 junk\n" * 1000)
                assert asked(short, [SHORT_PROMPT] * 8) == [3] * 8
            assert not (tmp_path / "short" / "unused").exists()
            assert predictor_of(short)["num_predicted_prior"] == num_alone

            # It is killed: both go on with the prior, and find it again when it is back.
            os.kill(serving.pid, signal.SIGKILL)
            serving.wait()
            for each in (short, long):
                assert asked(each, [SHORT_PROMPT] * 4) == [3] * 4
                counted = predictor_of(each)
                assert counted["num_predicted_prior"] + counted["num_unsent"] >= 4
                assert not counted["worker_alive"]
            with service(tmp_path, address, port):
                for each in (short, long):
                    wait_until(lambda each=each: predictor_of(each)["worker_alive"] == 1)
                    before = predictor_of(each)
                    assert before["num_worker_restarts"] == 1
                    assert asked(each, [SHORT_PROMPT] * 4) == [3] * 4
                    after = predictor_of(each)
                    assert after["num_predicted_prior"] == before["num_predicted_prior"]
