"""Services go through a scripted day. Clients, operator and disk see the lines of recorded.txt.

`python -m tests.predictor_store.service.test_recorded` records it anew. After a deliberate change,
say in the commit why the lines changed.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict

from predictor_store.predict.asked import NUM_FEATURES, SHAPED, Asked, Scope
from predictor_store.predict.embedder import Embedder, dimension, fingerprint
from predictor_store.predict.model import folder_of_model
from predictor_store.service.messages import Finished, GoesOn, Lengths, Predict, Predicted, Refused
from predictor_store.service.worker import Outgoing, Worker
from predictor_store.store.file import Record
from predictor_store.store.store import Store
from sage_sched.app.config import PredictorConfig, SageConfig, StoreConfig
from tests.predictor_store.samples import answer, no_file_larger_than

RECORDED = Path(__file__).with_name("recorded.txt")
CAPACITY = 40
# A service of several models, and a server that predicts by the published rule, in memory.
SITUATIONS = {"service": PredictorConfig(), "server": PredictorConfig(threshold=0.6)}
LIMITS = {
    "service.worker": {
        "_MAX_QUEUED": 12, "_MAX_HANDLES": 70, "_MAX_ANSWERS": 2, "_MAX_MODELS": 3,
        "_MAX_CLIENTS": 6,
    },
    "predict.model": {"_MAX_SESSIONS": 3},
    "predict.history": {"_LEAST_KNOWN": 8, "_MAX_FITTED": 35, "MIN_PROMPTS": 15},
    "predict.regression": {"MIN_PROMPTS": 15},
    "predict.predictor": {"NUM_NEAREST": 12},
    "predict.quality": {"WINDOW": 20},
    "store.store": {"_MAX_UNWRITTEN": 10},
}  # fmt: skip
# The usual lengths of answers.
TASKS = {
    "Name": 4, "Translate into French:": 30, "List 5 facts about": 120,
    "Write an essay of 500 words on": 700, "Explain in detail": 400,
}  # fmt: skip
TOPICS = "moss", "Peru", "a sonnet", "the moon", "tax law", "ants", "jazz", "steel", "Faust"
SCOPES = [
    *["", "", Scope("adapter").name, Scope("", "stops").name, Scope("", "stops").name],
    *[Scope("adapter", "other stops").name, Scope("", "JSON", SHAPED).name],
]
LONG = "in the words of a very old and learned man who has seen much of the world, " * 9
_NUMBER = re.compile(r"-?\d+\.\d+")


def done(fit: Callable[[], Any]) -> Future[Any]:
    future = Future[Any]()
    future.set_result(fit())
    return future


class Day:
    """lines: the record. is_changed: whether the served model has changed, so that earlier short
    answers are long."""

    def __init__(self, config: SageConfig) -> None:
        self.lines: list[str] = []
        self.now_s = 1000.0
        self.is_changed = False
        self._config = config
        self._script = random.Random(7)
        self._num_asked = 0
        # Prompts' client and handle, the length of their answers, and whether most are cut.
        self._asked: list[tuple[Hashable, int, float, bool]] = []
        self._open()

    def _open(self) -> None:
        by_model = self._config.store.on_disk
        self.worker = Worker(self._config, by_model=by_model, now=lambda: self.now_s)
        for client, model in enumerate(("one", "one", "other")):
            self._connect(client, model)

    def _connect(self, client: Hashable, model: str, *, only_asks: bool = False) -> None:
        self.worker.connect(client, model, only_asks=only_asks)
        self._hear(self.worker.step())

    def _hear(self, outgoing: Iterable[Outgoing]) -> None:
        for client, message in outgoing:
            self.lines.append(f"{client} {type(message).__name__} {told(message)}")

    def _ask(self, client: int) -> None:
        script, self._num_asked = self._script, self._num_asked + 1
        task = script.choice([*TASKS])
        text = f"{task} {script.choice(TOPICS)}"
        if is_hot := script.random() < 0.4:  # nearly one prompt
            task, text = "Name", f"Name all things {LONG} and {script.randrange(9)} more"
        session = script.choice(("", "", "a", "b", "c", "d"))
        asked = script.choice((Asked(session=session, input_tokens=300), Asked(thinks=1), Asked()))
        predict = Predict(self._num_asked, text, script.choice(SCOPES), asked)
        self.worker.receive(client, predict)
        length = TASKS[task] * (1 + asked.thinks) * script.lognormvariate(0, 0.5)
        length = 2000 / length if self.is_changed else length
        self._asked.append((client, self._num_asked, length, is_hot))

    def _answer(self, *, goes_on: bool) -> None:
        script = self._script
        client, handle, length, is_hot = of = script.choice(self._asked[-60 if goes_on else -30 :])
        if goes_on:
            num_tokens = max(1, round(length * script.random()))
            self.worker.receive(client, GoesOn(handle, 5, num_tokens))
            return
        is_cut, is_stopped = script.random() < (0.7 if is_hot else 0.15), script.random() < 0.2
        num_tokens = round(length / (2 if is_cut or is_stopped else 1))
        self.worker.receive(client, Finished(handle, 5, num_tokens, is_cut, is_stopped))
        if script.random() < 0.8:
            self._asked.remove(of)

    def goes_by(self, num_ticks: int) -> None:
        self._ask(0)  # its answer is long, and its record is dropped before it ends
        slow = self._num_asked
        for tick in range(num_ticks):
            if tick % 20 == 19:
                self.worker.receive(0, GoesOn(slow, 5, 10 * tick))
            self.now_s += self._script.expovariate(20)
            kind = self._script.random()
            if kind < 0.37 or not self._asked:
                self._ask(self._script.choice((0, 0, 0, 1, 2)))
            elif kind < 0.85:
                self._answer(goes_on=kind < 0.47)
            elif kind < 0.96:
                self._hear(self.worker.step())
            else:
                self.now_s += 2
                self._hear(self.worker.report())

    def crowds(self, num_prompts: int) -> None:
        """A client asks more prompts than are kept, and more than are predicted in time."""
        for _ in range(num_prompts):
            self._ask(0)
        while self.worker.busy:
            self.now_s += 0.4
            self._hear(self.worker.step())

    def clients_change(self) -> None:
        self._connect("router", "unheard of", only_asks=True)
        models = {2: ("third", "fourth", "third"), 3: ("fifth",), 4: ("sixth",), 5: ("one",) * 2}
        for client, names in models.items():
            for model in names:
                self.worker.disconnect(client)
                self._connect(client, model)
                self.lines.append(f"models {[*self.worker.stats()]}")
        self._connect(6, "one")
        self._connect(7, "one")
        for client in (3, 5, 6):
            self.worker.disconnect(client)

    def restarts(self) -> None:
        self.worker.disconnect(2)
        self.worker.close()
        for model in ("one", "other", "third") if self._config.store.on_disk else ():
            of_model = StoreConfig(str(folder_of_model(self._config.store, model)), CAPACITY)
            with Store(of_model, fingerprint(), dimension()) as store:
                self.lines += [f"{model} has {kept(record)}" for record in store.load()]
        self._open()


def kept(record: Record) -> str:
    features = record.vector[-NUM_FEATURES:] @ np.arange(1, NUM_FEATURES + 1)
    return f"{astuple(record)[1:]} {features:.2f}"


def told(message: Any) -> str:
    if isinstance(message, Predicted):
        return f"{message.handle} {said(message.lengths)}"
    if isinstance(message, Refused):
        return message.because
    _, *counts = asdict(message.stats).values()  # without the process
    return f"{counts} {said(message.prior)}"


def said(lengths: Lengths | None) -> str:
    if lengths is None:
        return "nothing"
    found = lengths.read()
    shares = f"{found.quantile(0.1):.1f} {found.quantile(0.5):.1f} {found.quantile(0.9):.1f}"
    about = f"{found.source} {found.lengths.size} {found.effective_samples:.2f}"
    return f"{about} {found.mean():.2f} {shares}"


def lived(folder: Path, predictor: PredictorConfig, patch: pytest.MonkeyPatch) -> str:
    """Return the lines of a situation."""
    for module, limits in LIMITS.items():
        for name, limit in limits.items():
            patch.setattr(f"predictor_store.{module}.{name}", limit)
    at_once = SimpleNamespace(submit=done, shutdown=lambda **_: None)
    patch.setattr("predictor_store.predict.model.ThreadPoolExecutor", lambda *_, **__: at_once)
    threads = SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target))
    patch.setattr("predictor_store.service.worker.threading", threads)
    config = StoreConfig(str(folder), CAPACITY, on_disk=not predictor.threshold)
    warm = StoreConfig(str(folder_of_model(config, "one")), CAPACITY)
    with Store(warm, fingerprint(), dimension()) as store:
        texts = [f"{task} {topic}" for task in TASKS for topic in TOPICS[:4]]
        for number, vector in enumerate(Embedder().embed(texts)):
            store.add(answer(vector, 40 + 5 * number, origin="warm"))
    day = Day(SageConfig(config, predictor))
    clock = SimpleNamespace(monotonic=lambda: day.now_s)
    patch.setattr("predictor_store.store.store.time", clock)
    day.goes_by(300)
    day.crowds(20)
    with no_file_larger_than(0):
        day.goes_by(150)
    day.clients_change()
    day.is_changed = True
    day.goes_by(300)
    day.restarts()
    day.goes_by(100)
    day.crowds(8)
    day.worker.close()
    return "\n".join(day.lines)


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_service_does_as_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RECORDED.read_text().split("\n\n")[[*SITUATIONS].index(name)]
    now = lived(tmp_path, SITUATIONS[name], monkeypatch)
    assert _NUMBER.sub("#", now).splitlines() == _NUMBER.sub("#", recorded).splitlines()
    # Other processors round sums differently.
    found, known = (np.array(_NUMBER.findall(text), float) for text in (now, recorded))
    np.testing.assert_allclose(found, known, rtol=2e-3)


def main() -> None:
    found = []
    for predictor in SITUATIONS.values():
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            found.append(lived(Path(folder), predictor, patch))
    RECORDED.write_text("\n\n".join(found) + "\n")


if __name__ == "__main__":
    main()
