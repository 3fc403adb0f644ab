from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from predictor_store.data.store_info import facts
from predictor_store.predict import predictor
from predictor_store.predict.asked import Scope
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.quality import WINDOW, Forecast
from predictor_store.service.protocol import (
    LineReader,
    decode_distribution,
    encode,
    encode_distribution,
)
from predictor_store.service.worker import Worker
from predictor_store.store.file import StoreError
from predictor_store.store.store import Store
from sage_sched.config import PredictorConfig, SageConfig, StoreConfig
from sage_sched.distribution import LengthDistribution


@pytest.fixture
def config(tmp_path: Path) -> SageConfig:
    return SageConfig(StoreConfig(str(tmp_path)), PredictorConfig())


@pytest.fixture
def worker(
    config: SageConfig, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    worker = Worker(config, now=lambda: 0.0)
    greeted(worker, 1)
    yield worker
    worker.close()


def greeted(worker: Worker, client: int, model: str = "") -> dict[str, Any]:
    """What a new client is told first."""
    return worker.connect(client, model)


def news(worker: Worker, client: int = 1) -> dict[str, Any]:
    return dict(worker.report())[client]


def predict(handle: int, text: str = "Who wrote Faust?") -> dict[str, Any]:
    return {"predict": handle, "text": text, "scope": ""}


def finished(handle: int, output_tokens: int, censored: bool = False) -> dict[str, Any]:
    return {
        "finished": handle,
        "input_tokens": 5,
        "output_tokens": output_tokens,
        "censored": censored,
    }


def answers(worker: Worker) -> dict[int, LengthDistribution | None]:
    """Everything that waits, embedded and predicted."""
    found = {}
    while worker.busy:
        for _, answer in worker.step():
            found[answer["predicted"]] = decode_distribution(answer["distribution"])
    return found


def test_a_client_that_ends_its_answers_shortens_and_spoils_no_other_prediction(
    worker: Worker,
) -> None:
    """By what it sends beside the prompt: half of all requests are such."""
    limited = {"scope": Scope("", "stops").name}
    for i in range(WINDOW + 50):
        worker.receive(1, predict(2 * i))
        worker.receive(1, {**predict(2 * i + 1), "scope": Scope("", f"stops {i}").name})
        answers(worker)
        worker.receive(1, finished(2 * i, 300))
        worker.receive(1, {**finished(2 * i + 1, 1), "stopped": True})
    told = news(worker)["stats"]["quality"]
    assert (told["num_answers"], told["widened"]) == (WINDOW, False)
    worker.receive(1, predict(-1))
    worker.receive(1, {**predict(-2), **limited})
    found = answers(worker)
    for handle in (-1, -2):
        assert (lengths := found[handle]) is not None
        assert lengths.quantile(0.1) >= 300


def test_answers_that_clients_end_are_judged_once_their_kind_is_known(worker: Worker) -> None:
    scope = {"scope": Scope("", "stops").name}
    for i in range(40):
        worker.receive(1, {**predict(i), **scope})
        answers(worker)
        worker.receive(1, {**finished(i, 7), "stopped": True})
    assert news(worker)["stats"]["quality"]["num_answers"] == 10


def test_lengths_that_finished_are_predicted(worker: Worker) -> None:
    worker.receive(1, predict(1))
    unseen = answers(worker)[1]
    assert unseen is not None
    assert unseen.source == "general"
    for _ in range(10):
        worker.receive(1, finished(1, 10))
        worker.receive(1, finished(1, 3000))
    worker.receive(1, predict(2))
    found = answers(worker)[2]
    assert found is not None
    assert found.source == "history"
    shares = [found.weights[found.lengths == length].sum() for length in (10, 3000)]
    assert min(shares) > 0.4


def test_n_answers_to_one_prompt_are_n_records(worker: Worker) -> None:
    worker.receive(1, predict(1))
    answers(worker)
    for length in range(1, 6):
        worker.receive(1, finished(1, length))
    assert news(worker)["stats"]["num_records"] == 5


def test_an_answer_may_finish_before_its_prompt_is_embedded(worker: Worker) -> None:
    worker.receive(1, predict(1))
    worker.receive(1, finished(1, 10))
    worker.receive(1, finished(1, 20, censored=True))
    answers(worker)
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_unrecorded"]) == (2, 0)


def test_what_is_recorded_is_on_disk_after_a_report(
    worker: Worker, config: SageConfig, embedder: Embedder
) -> None:
    worker.receive(1, predict(1, "my secret"))
    answers(worker)
    worker.receive(1, finished(1, 777, censored=True))
    worker.report()
    worker.close()
    from predictor_store.predict.embedder import dimension, fingerprint

    with Store(config.store, fingerprint(), dimension()) as store:
        (stored,) = store.load()
        assert (stored.output_tokens, stored.input_tokens, stored.censored) == (777, 5, True)
        assert not any(b"my secret" in file.read_bytes() for file in store.folder.iterdir())
        assert stored.vector @ embedder.embed(["my secret"])[0] > 0.999
    worker.__init__(config)  # type: ignore[misc]
    assert greeted(worker, 1)["ready"]["num_records"] == 1


def test_the_prior_follows_the_history(worker: Worker) -> None:
    before = decode_distribution(greeted(worker, 2)["prior"])
    worker.receive(1, predict(1))
    answers(worker)
    for _ in range(30):
        worker.receive(1, finished(1, 10))
    after = decode_distribution(news(worker)["prior"])
    assert before is not None
    assert after is not None
    assert before.quantile(0.5) > 10 == after.quantile(0.5)
    assert not worker.report()


def test_the_first_requests_are_told_apart(worker: Worker) -> None:
    worker.receive(1, predict(1, "Write a long story about a dragon who learns to sail."))
    worker.receive(1, predict(2, "Is 91 a prime number? Answer yes or no."))
    found = answers(worker)
    assert found[1] is not None
    assert found[2] is not None
    assert found[1].mean() > 1.1 * found[2].mean()


def test_a_session_s_answers_foretell_its_next(worker: Worker) -> None:
    """Of two that ask the same, and of nobody else."""
    lengths = {"terse": 5, "chatty": 2000}
    for i in range(12):
        for handle, (session, length) in enumerate(lengths.items()):
            worker.receive(1, {**predict(handle, f"Go on, {i}."), "asked": {"session": session}})
            answers(worker)
            worker.receive(1, finished(handle, length))
    asked = [{"session": "terse"}, {"session": "chatty"}, {}]
    for handle, what in enumerate(asked):
        worker.receive(1, {**predict(handle, "Go on."), "asked": what})
    found = answers(worker)
    terse, chatty, other = (found[handle].mean() for handle in range(3))  # type: ignore[union-attr]
    assert terse < 0.7 * other
    assert chatty > 1.3 * other


def test_minilm_may_make_the_vectors(config: SageConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(config, predictor=PredictorConfig(encoder="minilm"))
    worker = Worker(config)
    greeted(worker, 1)
    worker.receive(1, predict(1))
    assert 1 in answers(worker)
    worker.receive(1, finished(1, 10))
    worker.report()
    worker.close()
    with pytest.raises(StoreError, match="made with the embedder all-MiniLM"):
        Worker(SageConfig(config.store))


def goes_on(handle: int, output_tokens: int) -> dict[str, Any]:
    return {"goes_on": handle, "input_tokens": 5, "output_tokens": output_tokens}


def test_answers_that_go_on_foretell_too(worker: Worker) -> None:
    """The short ones end first: of those alone, all would be foreseen to be short."""
    for handle in range(40):
        worker.receive(1, predict(handle))
    answers(worker)
    for handle in range(40):
        worker.receive(1, finished(handle, 10) if handle % 4 == 0 else goes_on(handle, 500))
    worker.receive(1, predict(100))
    foreseen = answers(worker)[100]
    assert foreseen is not None
    assert foreseen.mean() > 300
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_malformed"]) == (10, 0)


def test_an_answer_that_went_on_is_one_record_in_the_end(
    worker: Worker, config: SageConfig
) -> None:
    for handle in (1, 2):
        worker.receive(1, predict(handle))
    answers(worker)
    for message in (goes_on(1, 64), goes_on(1, 128), finished(1, 200), finished(2, 100)):
        worker.receive(1, message)
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_records"]) == (2, 2)


def test_what_an_unknown_answer_has_is_nothing_to_anybody(worker: Worker) -> None:
    worker.receive(1, goes_on(77, 64))
    news_or_none = dict(worker.report()).get(1)
    assert news_or_none is None or news_or_none["stats"]["num_malformed"] == 0


def test_an_unknown_handle_is_counted(worker: Worker) -> None:
    worker.receive(1, finished(99, 10))
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_unrecorded"]) == (0, 1)


MALFORMED = [
    None,
    {},
    {"predict": 1},
    {"predict": "1", "text": "x", "scope": ""},
    {"predict": 1, "text": "x"},
    {"predict": 1, "text": 5, "scope": ""},
    {"predict": 1, "text": "x", "scope": 5},
    {"predict": 1, "text": "x", "scope": "", "asked": []},
    {"predict": 1, "text": "x", "scope": "", "asked": {"thinks": "yes"}},
    {"predict": 1, "text": "x", "scope": "x" * 1001},
    {"finished": 1, "input_tokens": -1, "output_tokens": 1, "censored": False},
    {"finished": 1, "input_tokens": 10**30, "output_tokens": 1, "censored": False},
    {"finished": 1, "input_tokens": 5, "output_tokens": 10**30, "censored": False},
    {"finished": 1, "input_tokens": 5, "output_tokens": 1.5, "censored": False},
    {"finished": 1, "input_tokens": 5, "output_tokens": 1, "censored": "no"},
    {"finished": 1, "input_tokens": 5, "output_tokens": 1, "censored": None},
    {"finished": 1, "input_tokens": 5, "output_tokens": 1},
    {"other": [1, 2]},
]


def test_malformed_messages_are_counted_and_harmless(worker: Worker) -> None:
    for message in MALFORMED:
        worker.receive(1, message)
    assert news(worker)["stats"]["num_malformed"] == len(MALFORMED)
    worker.receive(1, predict(1))
    assert 1 in answers(worker)


def asked_at_once(worker: Worker) -> range:
    """Handles of more prompts than a batch takes."""
    handles = range(30)
    for handle in handles:
        worker.receive(1, predict(handle, f"a long prompt, number {handle} " * 40))
    return handles


def test_prompts_are_predicted_in_the_order_in_which_they_came(worker: Worker) -> None:
    assert [*answers(worker)] == []
    handles = asked_at_once(worker)
    assert [*answers(worker)] == [*handles]


def test_under_overload_the_newest_come_first_and_none_is_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = asked_at_once(worker)
    # The first of them would have their prediction too late.
    monkeypatch.setattr(worker, "_now", lambda: 0.9)
    first = [answer["predicted"] for _, answer in worker.step()]
    assert 1 < len(first) < 30
    assert first == [*range(30 - len(first), 30)]
    assert set(first) | set(answers(worker)) == set(handles)


def test_a_poisoned_history_is_seen_through(
    worker: Worker, config: SageConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "NUM_NEAREST", 32)
    prompts = {"Who wrote Faust?": 10, "Describe every street of Weimar.": 1000}

    def answered(num: int) -> None:
        for _ in range(num):
            for handle, (prompt, length) in enumerate(prompts.items()):
                worker.receive(1, predict(handle, prompt))
                answers(worker)
                worker.receive(1, finished(handle, length))

    def means() -> list[float]:
        for handle, prompt in enumerate(prompts):
            worker.receive(1, predict(handle, prompt))
        found = answers(worker)
        return [found[handle].mean() for handle in (0, 1)]  # type: ignore[union-attr]

    answered(32)
    worker.report()
    wrong = Forecast(LengthDistribution.from_samples([10], "history"), worker._histories[""].prior)
    for _ in range(WINDOW):
        worker._histories[""]._quality.add(wrong, 1000)
    worker.report()
    quality = worker._histories[""].stats()["quality"]
    assert quality["widened"]
    assert quality["crps_gain"] < 0
    assert means()[0] == means()[1]  # nobody is told apart by what is wrong
    kept = facts(Path(config.store.path))["predictions"]
    assert kept["widened"]
    # When they are right again they are used again.
    answered(WINDOW)
    assert not worker._histories[""].stats()["quality"]["widened"]
    assert means()[0] < means()[1]


@pytest.fixture
def service(
    config: SageConfig, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    """Of which clients name their models."""
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    service = Worker(config, by_model=True)
    yield service
    service.close()


def test_any_name_is_a_models(service: Worker) -> None:
    for number, model in enumerate(("\ud800", "\ud801", "..", "a/b", "x" * 10_000), 2):
        assert "ready" in greeted(service, number, model)
    assert len(set(service._histories)) == 5


def test_answers_to_a_prompt_that_waits_are_bounded(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_ANSWERS", 5)
    worker.receive(1, predict(1))
    for _ in range(8):
        worker.receive(1, finished(1, 10))
    answers(worker)
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_unrecorded"]) == (5, 3)


def test_the_queue_is_bounded(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_QUEUED", 5)
    for handle in range(8):
        worker.receive(1, predict(handle))
    # Who asked for what is dropped does not wait for it.
    assert [answer["predicted"] for _, answer in worker.step()] == [*range(8)]
    assert not worker.busy
    assert news(worker)["stats"]["num_dropped"] == 3


def test_the_oldest_handles_are_forgotten(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.service.worker._MAX_HANDLES", 5)
    for handle in range(8):
        worker.receive(1, predict(handle))
        answers(worker)
    for handle in range(8):
        worker.receive(1, finished(handle, 10))
    stats = news(worker)["stats"]
    assert (stats["num_recorded"], stats["num_unrecorded"]) == (5, 3)


def test_lines_come_together_from_any_pieces() -> None:
    messages = [{"text": "\ud800 \n é"}, {"a": [1.5, None]}, {"b": "x" * 1000}]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 7, 100, 10_000):
        reader = LineReader()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [m for piece in pieces for m in reader.feed(piece)] == messages


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"\xff\xfe", b"1", b'{"a":1', b"[" * 100_000])
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert list(LineReader().feed(line + b"\n" + encode({"a": 1}))) == [None, {"a": 1}]


def test_distributions_travel_unchanged() -> None:
    found = LengthDistribution.from_samples([1, 5, 5, 900], "warm", [0.1, 0.2, 0.3, 0.7])
    (message,) = LineReader().feed(encode({"d": encode_distribution(found)}))
    assert message is not None
    assert decode_distribution(message["d"]) == found
    assert decode_distribution(encode_distribution(None)) is None


def test_a_model_without_clients_makes_room_for_another(
    config: SageConfig, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "predictor_store.service.worker.Embedder", lambda encoder, num_threads: embedder
    )
    monkeypatch.setattr("predictor_store.service.worker._MAX_MODELS", 2)
    worker = Worker(config, by_model=True)
    for number in range(5):  # each stays a while and learns something
        greeted(worker, number, f"model {number}")
        worker.receive(number, predict(1))
        answers(worker)
        worker.receive(number, finished(1, 10))
        worker.disconnect(number)
    assert greeted(worker, 10, "model 0")["ready"]["num_records"] == 1
    assert "ready" in greeted(worker, 11, "model 4")
    assert greeted(worker, 12, "new")["because"] == "busy"
    assert "ready" in greeted(worker, 13, "model 0")
    worker.disconnect(11)
    assert "ready" in greeted(worker, 12, "new")
    worker.close()
