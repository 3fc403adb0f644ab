"""Servers in other ways: started otherwise, untouched, on two ranks, refused."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.server import Server, ServerError
from tests.engine.serving import (
    CPU_FLAGS,
    LONG_PROMPT,
    SHORT_PROMPT,
    SageServer,
    generate,
    warmed_store,
)

SAGE_SCHED = Path(sys.executable).parent / "sage-sched"
SGLANG = Path(sys.executable).parent / "sglang"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed_store(tmp_path_factory.mktemp("warmed") / "store")


def copy_of(store: Path, folder: Path) -> Path:
    return Path(shutil.copytree(store, folder / "store"))


def test_not_chosen_the_answers_are_those_of_a_server_without_the_plugin(
    model: Path, tmp_path: Path
) -> None:
    prompts = [f"{LONG_PROMPT} Part {i}." for i in range(6)]

    def answers(name: str, env: dict[str, str]) -> list[Any]:
        with Server(model, CPU_FLAGS, log=tmp_path / f"{name}.log", env=env) as server:
            info = requests.get(f"{server.url}/server_info", timeout=30).json()
            assert "sage" not in info["internal_states"][0]
            return [generate(server, prompt, 40)["output_ids"] for prompt in prompts]

    assert answers("installed", {}) == answers("absent", {"SGLANG_PLUGINS": "sage_cpu"})


@pytest.mark.parametrize(
    "command",
    [(str(SAGE_SCHED), "serve"), (str(SGLANG), "serve", "--schedule-policy", "sage")],
    ids=["sage-sched serve", "sglang serve"],
)
def test_every_way_to_start_a_server(
    command: tuple[str, ...], model: Path, store: Path, tmp_path: Path
) -> None:
    config = tmp_path / "sage.yaml"
    config.write_text(f"store: {{path: {copy_of(store, tmp_path)}}}\n")
    flags = [*CPU_FLAGS, "--sage-config", str(config)]
    with Server(model, flags, log=tmp_path / "server.log", command=command) as server:
        generate(server, SHORT_PROMPT)
        info = requests.get(f"{server.url}/server_info", timeout=30).json()
        assert info["schedule_policy"] == "sage"
        assert sum(info["internal_states"][0]["sage"]["num_ranked"].values()) == 1


def test_the_engine_api(model: Path, store: Path, tmp_path: Path) -> None:
    config = tmp_path / "sage.toml"
    config.write_text(f'[store]\npath = "{copy_of(store, tmp_path)}"\n')
    code = f"""
import json
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(model_path={str(model)!r}, schedule_policy="sage", device="cpu",
                           mem_fraction_static=0.1, max_total_tokens=4096)
    engine.generate([{SHORT_PROMPT!r}, {LONG_PROMPT!r}], {{"max_new_tokens": 3}})
    print(json.dumps(engine.get_server_info()["internal_states"][0]["sage"]))
    engine.shutdown()
"""
    script = tmp_path / "engine_script.py"
    script.write_text(code)
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "SAGE_CONFIG": str(config)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    stats = json.loads(result.stdout.strip().splitlines()[-1])
    assert sum(stats["num_ranked"].values()) == 2


def test_two_tensor_parallel_ranks_sort_alike(model: Path, store: Path, tmp_path: Path) -> None:
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        # SGLang's own check that every rank runs the same batch.
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }
    flags = ["--tp-size", "2", "--max-running-requests", "3"]
    with SageServer(model, tmp_path, copy_of(store, tmp_path), flags=flags, env=env) as server:
        prompts = [f"{SHORT_PROMPT if i % 3 else LONG_PROMPT} {i}" for i in range(24)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda prompt: generate(server, prompt, 12), prompts))
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [12] * 24
        assert sum(server.stats()["num_ranked"].values()) == 24


def test_a_store_of_another_dimension_stops_the_start(
    model: Path, store: Path, tmp_path: Path
) -> None:
    foreign = copy_of(store, tmp_path)
    with sqlite3.connect(foreign / "history.sqlite3") as database:
        changed = database.execute("UPDATE meta SET value = '768' WHERE key = 'dimension'")
        assert changed.rowcount == 1
    server = SageServer(model, tmp_path, foreign)
    with pytest.raises(ServerError, match="768") as error, server:
        pass
    assert "sage-sched warm" in str(error.value)
