from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.model import folder_of_model
from predictor_store.service.messages import Finished, Predict, Refused, Welcome
from predictor_store.service.worker import Worker
from predictor_store.store import lock
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import SageConfig, StoreConfig
from tests.predictor_store.samples import greeted, record


@pytest.fixture
def config(tmp_path: Path) -> SageConfig:
    return SageConfig(StoreConfig(str(tmp_path)))


@pytest.fixture
def service(config: SageConfig) -> Iterator[Worker]:
    with closing(Worker(config, by_model=True)) as service:
        yield service


def learn(worker: Worker, *texts: str) -> None:
    for length, text in enumerate(texts, 1):
        worker.receive(1, Predict(0, text))
        worker.step()
        worker.receive(1, Finished(0, 5, length, False))


def test_vectors_of_prompts_are_written_and_not_their_words(
    config: SageConfig, embedder: Embedder
) -> None:
    with closing(Worker(config)) as worker:
        greeted(worker, 1)
        learn(worker, "my secret")
    with Store(config.store, fingerprint(), dimension()) as store:
        (kept,) = store.load()
        assert not any(b"secret" in file.read_bytes() for file in store.folder.iterdir())
    assert kept.vector @ embedder.embed(["my secret"])[0] > 0.999


def test_any_name_is_a_models(service: Worker, config: SageConfig) -> None:
    names = "\ud800", "\ud801", "..", "a/b", "x" * 10_000, "x" * 10_001
    assert {type(greeted(service, number, name)) for number, name in enumerate(names)} == {Welcome}
    assert [*service.stats()] == [*names]
    assert len({*Path(config.store.path).glob("model */history.sqlite3")}) == len(names)


def test_a_damaged_store_is_refused_and_released(service: Worker, config: SageConfig) -> None:
    folder = folder_of_model(config.store, "damaged")
    with Store(replace(config.store, path=str(folder)), fingerprint(), dimension()) as store:
        store.add(record(1))
    with closing(sqlite3.connect(file_of(folder))) as connection, connection:
        connection.execute("UPDATE records SET crc32 = 1")
    refused = greeted(service, 1, "damaged")
    assert isinstance(refused, Refused)
    assert (refused.because, lock.holder(folder)) == ("store", None)


@pytest.mark.slow
def test_the_score_is_fitted_again_and_again(config: SageConfig) -> None:
    with closing(Worker(config)) as worker:
        greeted(worker, 1)
        for first in (0, 60):
            score = worker._histories[""]._history.score
            learn(worker, *(f"prompt {number}" for number in range(first, first + 60)))
            deadline_s = time.monotonic() + 60
            while worker._histories[""]._history.score is score:
                assert time.monotonic() < deadline_s
                worker.report()
