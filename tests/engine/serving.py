"""Helpers for tests against a real server."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
from numpy.typing import NDArray

from bench.engines.server.policy_server import CPU_ENV
from bench.engines.server.server import Server
from patches.compat import serves_named_app
from predictor_store.data.warm import Observation, warm_store
from predictor_store.predict.embedder import NUM_BESIDE, Embedder
from sage_sched.app.config import StoreConfig
from tests.checks.exactness import STRICT, Answering

# Otherwise an idle server takes a core from all others. Memory that other processes take while a
# server starts counts as its weights, up to the fraction.
CPU_FLAGS = [
    "--device", "cpu", "--dtype", "float32",
    "--mem-fraction-static", "0.5", "--max-total-tokens", "8192", "--sleep-on-idle",
]  # fmt: skip
# A server waits for a prediction, however long it takes.
_PATIENT = "[predictor]\ndeadline_ms = 600000.0\n"
# SGLang accounts for each token after each step.
CHECKED = CPU_ENV | STRICT
# Prompts of two kinds, which the embedder tells apart: of short and of long answers.
SHORT_PROMPT = "What is the capital of France?"
LONG_PROMPT = "Write a long story about a dragon who learns to sail the seven seas."
# The same kinds. A server under test learns no answers to these before a test of the order.
UNASKED_SHORT_PROMPT = "Is 91 a prime number? Answer yes or no."
UNASKED_LONG_PROMPT = "Draft the complete rental contract of a farm, clause by clause."
# The prompt of SGLang's warm-up (entrypoints/http_server.py), and a prompt by which tests find out
# which answers are on disk.
WARM_UP = "The capital city of France is"
MARKER = "Continue: 3, 1, 4, 1, 5"
PROMPTS = (
    SHORT_PROMPT, LONG_PROMPT, UNASKED_SHORT_PROMPT, UNASKED_LONG_PROMPT, WARM_UP, MARKER, "",
)  # fmt: skip
_SHORTEST = {
    SHORT_PROMPT: 5, UNASKED_SHORT_PROMPT: 5, LONG_PROMPT: 900, UNASKED_LONG_PROMPT: 900,
}  # fmt: skip
_WARM = [Observation(prompt, num + i % 3) for prompt, num in _SHORTEST.items() for i in range(20)]


def warmed_store(path: Path) -> Path:
    warm_store(path, _WARM, StoreConfig())
    return path


# The time that one of several HTTP processes may take to start. It imports all of SGLang.
UNHURRIED = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "600"}
SEVERAL_HTTP_PROCESSES = pytest.mark.skipif(
    not serves_named_app(), reason="refused with this release of SGLang"
)


class SageServer(Server):
    """A server under one of our policies, with its history in `store`, by default a warmed one. It
    waits for predictions, unless `settings` have a section for the predictor."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        store: Path | None = None,
        *,
        flags: Sequence[str] = (),
        env: Mapping[str, str] = CHECKED,
        settings: str = "",
        policy: str = "sage",
    ) -> None:
        self.store = store or warmed_store(folder / "store")
        config = folder / "sage.toml"
        patient = "" if "[predictor]" in settings else _PATIENT
        config.write_text(f'[store]\npath = "{self.store}"\n{patient}{settings}')
        ours = ["--sage-config", str(config), "--schedule-policy", policy]
        log = folder / "server.log"
        super().__init__(model, [*CPU_FLAGS, *ours, *flags], log=log, env={**CPU_ENV, **env})

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler and the predictor."""
        stats: dict[str, Any] = states(self)[0]["sage"]
        return stats

    def preemption(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stats()["preemption"]
        return found

    def predictor_worker(self) -> psutil.Process:
        """Return the only process that predicts. Raises ValueError if there is none, or a second
        one."""
        assert self.pid is not None
        (found,) = (
            process
            for process in psutil.Process(self.pid).children(recursive=True)
            if "predictor_store.service.worker_process" in process.cmdline()
        )
        return found

    @contextmanager
    def without_predictions(self) -> Iterator[None]:
        """Suspend the predictor for a block."""
        worker = self.predictor_worker()
        worker.suspend()
        try:
            yield
        finally:
            worker.resume()

    def history(self, prompts: tuple[str, ...] = PROMPTS) -> list[tuple[str, int, bool]]:
        """Return the prompt and output tokens of each record, and whether it is censored. prompts:
        candidates, because the store keeps no prompts."""
        rows = "SELECT vector, output_tokens, censored FROM records WHERE origin = 'history'"
        with sqlite3.connect(f"file:{self.store / 'history.sqlite3'}?mode=ro", uri=True) as store:
            found = store.execute(rows).fetchall()
        return [(_prompt_of(vector, prompts), tokens, bool(cut)) for vector, tokens, cut in found]


@cache
def _embedded(prompts: tuple[str, ...]) -> NDArray[np.float32]:
    return Embedder().embed(prompts)[:, :-NUM_BESIDE]


def _prompt_of(vector: bytes, prompts: tuple[str, ...]) -> str:
    """Return the prompt of a recorded vector, or "another". One token more or less changes
    nothing."""
    cosines = _embedded(prompts) @ np.frombuffer(vector, "<f4")[:-NUM_BESIDE]
    return prompts[int(cosines.argmax())] if cosines.max() > 0.9 else "another"


def states(server: Answering) -> list[dict[str, Any]]:
    """Return each rank's state in /server_info."""
    info = requests.get(f"{server.url}/server_info", timeout=1200).json()
    found: list[dict[str, Any]] = info["internal_states"]
    return found


def post(
    server: Answering, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Any:
    """Return the JSON of an answer, or None. Raises requests.HTTPError unless the call succeeds."""
    answer = requests.post(server.url + path, json=body or {}, headers=headers, timeout=1200)
    answer.raise_for_status()
    is_json = "json" in answer.headers.get("Content-Type", "")
    return answer.json() if is_json else None


def generate(
    server: Answering, prompt: str | list[str] | None, max_new_tokens: int = 4, **more: Any
) -> Any:
    """Call /generate. `more` joins its body, and `sampling_params` in it the sampling. `headers`
    are the call's."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    headers, sampling = more.pop("headers", None), sampling | more.pop("sampling_params", {})
    body = {"text": prompt, **more, "sampling_params": sampling}
    return post(server, "/generate", body, headers)


def wait_until(condition: Callable[[], bool], timeout_s: float = 1200.0) -> None:
    """Poll until the condition holds. Raises TimeoutError after a limit that no host reaches."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not come about")
        time.sleep(0.05)
