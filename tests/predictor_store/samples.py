"""Records, histories and prompts for tests of this folder."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.embedder import dimension as dimension_of
from predictor_store.predict.history import History
from predictor_store.service.messages import ToClient
from predictor_store.service.worker import Worker
from predictor_store.store.file import Record
from sage_sched.distribution import LengthDistribution

JUNK = {
    "empty": "",
    "space": " \n\t" * 50,
    "lone surrogates": "\ud800 and \udfff",
    "nul": "a\x00b",
    "emoji": "👩‍👩‍👧‍👦" * 300,
    "right to left": "\u202e" + "שלום" * 10,
    "one word of 1 MB": "x" * 1_000_000,
    "1 MB of words": "word " * 200_000,
    "combining": "a" + "\u0301" * 5_000,
    "private use": "\ue000\uffff\U0010ffff",
}


def unit_vectors(num: int, seed: int = 0, dimension: int = dimension_of()) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(num, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def answer(vector: NDArray[np.float32], length: int, **fields: Any) -> Record:
    values = {"input_tokens": 0, "censored": False, "origin": "history"} | fields
    return Record(vector, length, **values)


def record(seed: int, **fields: Any) -> Record:
    return answer(unit_vectors(1, seed)[0], 10 + seed, **({"input_tokens": 5} | fields))


def learn(history: History, vector: NDArray[np.float32], *lengths: int, **fields: Any) -> None:
    for length in lengths:
        history.add(answer(vector, length, **fields))


def grown(num: int, seed: int = 0, dimension: int = 8) -> tuple[History, NDArray[np.float32]]:
    """Return a history of num records, whose vectors predict their lengths, except for noise."""
    rng = np.random.default_rng(seed)
    vectors = unit_vectors(num, seed, dimension)
    history = History(dimension, 0, num)
    for vector in vectors:
        noise = float(rng.normal(0, 0.1))
        learn(history, vector, round(100 * np.exp(2 * vector[0] + noise)))
    return history, vectors


def share_of(found: LengthDistribution | None, length: int) -> float:
    """Return the probability of this length."""
    assert found is not None
    return float(found.weights[found.lengths == length].sum())


def greeted(worker: Worker, client: Hashable, model: str = "") -> ToClient:
    """Connect a client, wait for its history, and return the worker's answer."""
    worker.connect(client, model)
    while not (told := worker.step()):
        pass
    ((name, message),) = told
    assert name == client
    return message


def lines(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


@contextlib.contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
