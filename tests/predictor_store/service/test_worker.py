from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from predictor_store.data.store_info import facts
from predictor_store.predict import predictor
from predictor_store.predict.asked import NEW_SESSION, NUM_FEATURES, Asked, Scope
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.model import Stats, folder_of_model
from predictor_store.predict.quality import WINDOW, Forecast
from predictor_store.service import messages
from predictor_store.service.messages import Finished, GoesOn, Predict, Predicted, Refused, Welcome
from predictor_store.service.worker import Worker
from predictor_store.store import lock
from predictor_store.store.store import Store, file_of
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig
from sage_sched.distribution import LengthDistribution
from tests.predictor_store.samples import no_file_larger_than, record, share_of

LIMITED = Scope("", "stops").name


@pytest.fixture
def config(tmp_path: Path) -> SageConfig:
    return SageConfig(StoreConfig(str(tmp_path)), PredictorConfig())


@pytest.fixture
def worker(config: SageConfig) -> Iterator[Worker]:
    with closing(Worker(config, now=lambda: 0.0)) as worker:
        worker.connect(1)
        yield worker


@pytest.fixture
def service(worker: Worker, config: SageConfig) -> Iterator[Worker]:
    with closing(Worker(config, by_model=True)) as service:
        yield service


def news(worker: Worker) -> messages.News:
    told = dict(worker.report())[1]
    assert isinstance(told, messages.News)
    return told


def counts(worker: Worker, *names: str) -> list[int]:
    return [getattr(news(worker).stats, f"num_{name}") for name in names]


def predict(handle: int, text: str = "Who wrote Faust?", **more: Any) -> Predict:
    return Predict(handle, text, **more)


def finished(handle: int, output_tokens: int, **more: Any) -> Finished:
    return Finished(handle, 5, output_tokens, **{"censored": False, **more})


def answers(worker: Worker) -> dict[int, LengthDistribution]:
    """Everything that waits, embedded and predicted."""
    found = {}
    while worker.busy:
        for _, answer in worker.step():
            assert isinstance(answer, Predicted)
            assert answer.lengths is not None
            found[answer.handle] = answer.lengths.read()
    return found


def answered(worker: Worker, asked: Predict, *ends: Finished) -> LengthDistribution:
    """The prediction for a prompt, whose answers then end."""
    worker.receive(1, asked)
    found = answers(worker)[asked.handle]
    for end in ends:
        worker.receive(1, end)
    return found


# One of these is 5.
LIMITS: list[tuple[str, list[Predict | Finished | None], list[int]]] = [
    ("_MAX_ANSWERS", [predict(1), *[finished(1, 10)] * 8], [5, 3, 0]),
    ("_MAX_QUEUED", [predict(0), finished(0, 10), *map(predict, range(1, 8))], [0, 1, 3]),
    ("_MAX_HANDLES", [*map(predict, range(8)), None, *(finished(i, 9) for i in range(8))],
     [5, 3, 0]),
    ("_MAX_HANDLES", [predict(1), None, finished(1, 10), finished(99, 10)], [1, 1, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "received", "expected"), LIMITS)
def test_what_is_kept_of_prompts_is_bounded(
    worker: Worker, limit: str, received: list[Predict | Finished | None], expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(f"predictor_store.service.worker.{limit}", 5)
    found = []
    for message in (*received, None):
        if message is not None:
            worker.receive(1, message)
        else:
            found += answers(worker)
    worker.count_malformed(1)
    worker.receive(2, finished(1, 10))  # no client
    worker.count_malformed(2)
    assert found == [one.handle for one in received if isinstance(one, Predict)]
    assert counts(worker, "recorded", "unrecorded", "dropped", "malformed") == [*expected, 1]


def test_answers_that_clients_end_are_judged_once_their_kind_is_known(worker: Worker) -> None:
    for i in range(40):
        answered(worker, predict(i, scope=LIMITED), finished(i, 7, stopped=True))
        answered(worker, predict(i), finished(i, 7, censored=True))  # is never judged
    assert news(worker).stats.quality["num_answers"] == 10


def test_a_report_writes_records(
    worker: Worker, config: SageConfig, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.store.store._MAX_UNWRITTEN", 1)
    asked = Asked(session="s")
    for handle, length in ((1, 777), (2, 9)):
        end = finished(handle, length, censored=handle == 1)
        answered(worker, predict(handle, "my secret", scope=LIMITED, asked=asked), end)
        worker.report()
    with no_file_larger_than(0):
        answered(worker, predict(3), *[finished(3, 10)] * 2)
        stats = news(worker).stats
    known = {"num_records": 4, "num_recorded": 4, "num_unwritten": 1, "num_lost": 1}
    assert stats == Stats(os.getpid(), **known, quality=stats.quality)
    worker.close()
    with Store(config.store, fingerprint(), dimension()) as store:
        first, second, third = store.load()
        assert not any(b"my secret" in file.read_bytes() for file in store.folder.iterdir())
    assert astuple(first)[1:] == (777, 5, True, "history", LIMITED)
    assert [astuple(one)[1:4] for one in (second, third)] == [(9, 5, False), (10, 5, False)]
    assert first.vector @ embedder.embed(["my secret"])[0] > 0.999
    features = asked.features(NEW_SESSION.after(5, 777, cut=True))
    assert second.vector[-NUM_FEATURES:].tolist() == features.tolist()
    with closing(Worker(config)) as again:
        assert isinstance(told := again.connect(1), Welcome)
        assert told.stats.num_records == 3


def test_the_prior_follows_the_history(worker: Worker) -> None:
    assert isinstance(told := worker.connect(2), Welcome)
    assert told.prior is not None
    answered(worker, predict(1), *[finished(1, 10)] * 30)
    after = news(worker).prior
    assert after is not None
    assert told.prior.read().quantile(0.5) > 10 == after.read().quantile(0.5)
    assert news(worker).prior is None


def test_the_published_rule_counts_similar_prompts_alone(config: SageConfig) -> None:
    published = PredictorConfig(threshold=0.8)
    with closing(Worker(replace(config, predictor=published))) as worker:
        worker.connect(1)
        for handle in range(8):
            answered(worker, predict(handle), finished(handle, 10))
            other = predict(handle + 8, "Invert a matrix of three rows.")
            answered(worker, other, finished(handle + 8, 500))
        found = answered(worker, predict(16, "Who wrote the Faust?"))
    assert (found.lengths.tolist(), found.source) == ([10], "history")


def test_answers_that_go_on_foretell_too_and_are_one_record_in_the_end(worker: Worker) -> None:
    """Short answers end first: their lengths alone would predict short ones for all."""
    for handle in range(40):
        answered(worker, predict(handle))
    for handle in range(40):
        if handle % 4 == 0:
            worker.receive(1, finished(handle, 10))
        else:
            for length in (64, 500):
                worker.receive(1, GoesOn(handle, 5, length))
    worker.receive(1, GoesOn(77, 5, 64))  # unknown
    assert answered(worker, predict(100)).mean() > 300
    assert counts(worker, "recorded", "going_on", "records") == [10, 60, 40]
    for _ in range(2):  # two answers to each prompt
        for handle in range(40):
            worker.receive(1, finished(handle, 10))
    assert answered(worker, predict(100)).quantile(0.5) == 10
    assert counts(worker, "recorded", "records") == [90, 90]


def test_uncut_answers_of_the_sessions_with_the_newest_ones_foretell(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.predict.model._MAX_SESSIONS", 2)
    ends = [*[700] * 4, 3]
    for session in "abac":
        of = [finished(1, length, censored=length == 3) for length in ends]
        answered(worker, predict(1, asked=Asked(session=session)), *of)
    for handle in range(40):
        answered(worker, predict(handle, "List all birds of Peru."), finished(handle, 20))
    a, b, c, none = (
        answered(worker, predict(2, "List all birds of Peru.", asked=Asked(session=session)))
        for session in ("a", "b", "c", "")
    )
    assert share_of(b, 700) == share_of(none, 700)
    for inside in (a, c):
        assert share_of(inside, 700) > 0.15 + share_of(none, 700)
        assert share_of(inside, 3) == 0


def test_prompts_are_predicted_in_order_and_in_overload_the_newest_first(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [*range(30)]  # more than a batch takes

    def ask() -> None:
        for handle in handles:
            worker.receive(1, predict(handle, f"a long prompt, number {handle} " * 40))

    assert [*answers(worker)] == []
    ask()
    assert [*answers(worker)] == handles
    ask()
    # The first of them would have their prediction too late, after half of the deadline.
    monkeypatch.setattr(worker, "_now", lambda: 0.6 * PredictorConfig().deadline_ms / 1e3)
    first = [answer.handle for _, answer in worker.step() if isinstance(answer, Predicted)]
    assert 1 < len(first) < 30
    assert first == handles[-len(first) :]
    assert {*first, *answers(worker)} == {*handles}


def test_clients_take_turns_over_several_batches(worker: Worker) -> None:
    clients = range(1, 6)  # more than a batch has room for
    for client in clients:
        worker.connect(client)
        for handle in range(2):
            worker.receive(client, predict(handle, "a long prompt " * 50))
    assert {client for _ in range(2) for client, _ in worker.step()} == {*clients}


def test_a_poisoned_history_is_seen_through(
    worker: Worker, config: SageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "NUM_NEAREST", 32)
    prompts = {"Who wrote Faust?": 10, "Describe every street of Weimar.": 1000}

    def means_after(num: int) -> list[float]:
        for prompt, length in [*prompts.items()] * num:
            answered(worker, predict(1, prompt), finished(1, length))
        return [answered(worker, predict(1, prompt)).mean() for prompt in prompts]

    history = worker._histories[""]
    means_after(32)
    worker.report()
    wrong = Forecast(LengthDistribution.from_samples([10], "history"), history.prior)
    for _ in range(WINDOW):
        history._quality.add(wrong, 1000)
    low, high = means_after(1)
    assert low == high  # wrong lengths make no prediction differ
    assert news(worker).stats.quality["widened"]
    assert facts(Path(config.store.path))["predictions"]["widened"]
    # When they are right again they are used again.
    low, high = means_after(WINDOW)
    assert low < high
    assert not news(worker).stats.quality["widened"]


def test_idle_models_make_room(service: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_MODELS", 2)

    def num_records(number: int, model: str) -> int:
        told = service.connect(number, model)
        assert isinstance(told, Welcome), told
        return told.stats.num_records

    for number in range(5):  # each stays a while and learns something
        num_records(number, f"model {number}")
        service.receive(number, predict(1))
        answers(service)
        service.receive(number, finished(1, 10))
        service.disconnect(number)
    assert num_records(10, "model 0") == 1
    num_records(11, "model 4")
    assert isinstance(refused := service.connect(12, "new"), Refused)
    assert refused.because == "busy"
    num_records(13, "model 4")
    for number in (10, 11, 13):
        service.disconnect(number)
    num_records(12, "new")
    assert [*service.stats()] == ["model 4", "new"]


def test_any_name_is_a_models_and_too_many_clients_are_refused(
    service: Worker, config: SageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_CLIENTS", 6)
    names = "\ud800", "\ud801", "..", "a/b", "x" * 10_000, "x" * 10_001
    assert {type(service.connect(number, name)) for number, name in enumerate(names)} == {Welcome}
    assert [*service.stats()] == [*names]
    assert len({*Path(config.store.path).glob("model */history.sqlite3")}) == len(names)
    assert isinstance(service.connect(6), Refused)
    service.disconnect(0)
    assert isinstance(service.connect(6), Welcome)


def test_a_damaged_store_is_refused_and_released(service: Worker, config: SageConfig) -> None:
    folder = folder_of_model(config.store, "damaged")
    with Store(replace(config.store, path=str(folder)), fingerprint(), dimension()) as store:
        store.add(record(1))
    with closing(sqlite3.connect(file_of(folder))) as connection, connection:
        connection.execute("UPDATE records SET crc32 = 1")
    refused = service.connect(1, "damaged")
    assert isinstance(refused, Refused)
    assert (refused.because, lock.holder(folder)) == ("store", None)


@pytest.mark.slow
def test_the_score_is_fitted_again_and_again(worker: Worker) -> None:
    for first in (0, 60):
        score = worker._histories[""]._history.score
        for handle in range(first, first + 60):
            answered(worker, predict(handle, f"prompt {handle}"), finished(handle, handle))
        deadline_s = time.monotonic() + 60
        while worker._histories[""]._history.score is score:
            assert time.monotonic() < deadline_s
            worker.report()
