"""Real SGLang servers on the CPU platform, with a small model and a store that holds little.

An idle server takes a core from those beside it, so that tests go server by server, and each server
ends before the next one starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.checks.exactness import STRICT, Spoken, ask, crowd
from bench.servers import plugins
from bench.servers.model import write_model
from bench.servers.policy_server import CPU_ENV
from bench.servers.server import Server
from predictor_store.cached_file import cache_folder
from predictor_store.token_vectors import token_vectors
from tests.engine import saboteur, stage
from tests.engine.serving import CPU_FLAGS, SageServer, warmed_store

BIN = Path(sys.executable).parent
ASKED = crowd(36)
# Six may run, and requests yield most often under this policy: every time that their age has
# doubled. It goes by tokens alone; swap_only, as what else is cheaper is a matter of the clock.
YIELDING = """
[policy.fastserve]
refresh_interval_tokens = 2
quantum_ms = 6.0
[step_time]
decode_base_ms = 6.0
prefill_base_ms = 6.0
prefill_token_ms = 0.0
[preemption]
enabled = true
max_yields = 1000
"""
YIELDING_FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "6"]
CHECKED = CPU_ENV | STRICT


def cache_with_encoder(factory: pytest.TempPathFactory) -> Path:
    """A user's cache that holds the encoder, which takes a minute to make, and no more."""
    with (factory.getbasetemp().parent / "encoder.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for the other workers of this run
        token_vectors()
    folder = factory.mktemp("cache")
    (folder / "sage-sched").mkdir(mode=0o700)
    for made in (*cache_folder().glob("*.npy"), *cache_folder().glob("*.onnx")):
        shutil.copy2(made, folder / "sage-sched")
    return folder


@pytest.fixture(scope="package", autouse=True)
def _staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every server here has the stage, and learns its step times anew."""
    env = plugins.install(tmp_path_factory.mktemp("stage"), stage.__name__)
    env |= {"XDG_CACHE_HOME": str(cache_with_encoder(tmp_path_factory))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    num_layers = int(os.environ.get("SAGE_TEST_NUM_LAYERS", "2"))
    return write_model(tmp_path_factory.mktemp("model") / "llama", num_layers=num_layers)


@dataclass(frozen=True)
class Stock:
    """What a stock server that has the plugin installed said to ASKED, and of itself."""

    answers: list[Spoken]
    state: dict[str, Any]


@pytest.fixture(scope="package")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with Server(model, CPU_FLAGS, log=log, env=CPU_ENV) as server:
        info = requests.get(f"{server.url}/server_info", timeout=60).json()
        return Stock(ask(server, ASKED, 12), info["internal_states"][0])


@pytest.fixture(scope="package")
def yielding(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SageServer]:
    """A server whose requests yield, and whose swapping can be spoilt (saboteur.py).

    stock: of a server that is gone by now.
    """
    folder = tmp_path_factory.mktemp("yielding")
    with SageServer(
        model,
        folder,
        warmed_store(folder / "store"),
        flags=YIELDING_FLAGS,
        env=CHECKED | saboteur.install(folder / "saboteur"),
        settings=YIELDING + "swap_only = true\n",
        policy="fastserve",
        command=(str(BIN / "sglang"), "serve"),
    ) as server:
        yield server
