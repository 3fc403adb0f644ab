"""Does the work of a prediction worker: takes in clients' messages, and returns messages to them.

It uses no socket; see predictor_store.service.server. One worker serves one server or many.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.asked import Asked, Scope
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.history import Place
from predictor_store.predict.model import ModelHistory, Stats, folder_of_model
from predictor_store.predict.quality import Forecast
from predictor_store.service import messages
from predictor_store.service.messages import (
    Finished,
    GoesOn,
    Lengths,
    News,
    Predict,
    Predicted,
    Refused,
    Welcome,
)
from predictor_store.store.file import Record, StoreError
from predictor_store.store.store import file_of
from sage_sched.app.config import SageConfig

# This is about 128 tokens, the most that MiniLM reads of a prompt.
_MAX_READ_CHARS = 600
# MiniLM takes as long for a batch as its longest prompt times their number, and each prompt waits
# for the whole batch. 20 short prompts take as long as 4 long ones.
_MAX_BATCH_CHARS = 4 * _MAX_READ_CHARS
# The maximum number of queued prompts of all clients. Beyond it, the client with the most prompts
# loses its oldest one, and gets the prior for it.
_MAX_QUEUED = 10_000
# The maximum number of remembered prompts, 3.1 KB each. If this many prompts arrive after a prompt,
# its answer is not recorded.
_MAX_HANDLES = 20_000
# The maximum number of answers to one prompt that are kept until it is embedded.
_MAX_ANSWERS = 1_000
# The maximum number of histories in memory, 20 MB each when full.
_MAX_MODELS = 64
_MAX_CLIENTS = 1_000

Vector = NDArray[np.float32]
# A message, and the client that it is for.
Outgoing = tuple[Any, messages.ToClient]


@dataclass(slots=True)
class Prompt:
    """A client's prompt.

    came_s: when it arrived. finished: answers that ended before it was embedded.
    vector, forecast: set once it is embedded. place: the place of its answer's record while the
        answer grows.
    """

    came_s: float
    text: str
    scope: str
    asked: Asked
    finished: list[Finished] = field(default_factory=list)
    vector: Vector = field(default_factory=lambda: np.empty(0, np.float32))
    forecast: Forecast = field(default_factory=Forecast)
    place: Place | None = None

    def record(self, answer: Finished | GoesOn) -> Record:
        scope, cut = self.scope, True
        if isinstance(answer, Finished):
            cut = answer.censored
            if answer.stopped:
                scope = Scope.read(scope).stopped().name
        return Record(self.vector, answer.output_tokens, answer.input_tokens, cut, "history", scope)


@dataclass(slots=True)
class Client:
    """A client. history: the history of its model. queue, embedded: its prompts by handle, oldest
    first."""

    history: ModelHistory
    queue: OrderedDict[int, Prompt] = field(default_factory=OrderedDict)
    embedded: OrderedDict[int, Prompt] = field(default_factory=OrderedDict)


class Worker:
    """The state of a worker, with its clients and histories.

    by_model: whether each model that clients name has its own history. Otherwise all models share
        one.
    """

    def __init__(
        self,
        config: SageConfig,
        *,
        by_model: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a worker. Raises StoreError before it loads the encoder, which takes seconds."""
        self._config = config
        self._by_model = by_model
        self._now = now
        # Prompts that have waited longer come last: their prediction would be late.
        self._patience_s = config.predictor.deadline_ms / 1e3 / 2
        # By model, the most recently named last.
        self._histories = OrderedDict[str, ModelHistory]()
        if not by_model:
            self._histories[""] = ModelHistory(config)
        self._embedder = Embedder(config.predictor.encoder, num_threads=1)
        self._embedder.embed(["The first call is slower than all others."])
        # Clients by name; the first is served next.
        self._clients: OrderedDict[Hashable, Client] = OrderedDict()
        # The histories that are being loaded, and the clients that are not connected yet, with
        # their histories' names.
        self._loading: dict[str, Future[ModelHistory]] = {}
        self._coming: dict[Hashable, str] = {}
        self._outgoing: list[Outgoing] = []
        # Called whenever step() has work, in any thread.
        self.wake: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        return any(by.queue for by in self._clients.values())

    def connect(self, client: Hashable, model: str = "", *, only_asks: bool = False) -> None:
        """Take in a client's Hello. step() returns the answer, Welcome or Refused, once the history
        of its model is loaded. Until Welcome, the client is not connected.

        A history is loaded in a thread of its own, because a large one takes minutes, and other
        clients must not wait for it. client: the client's name, which no other client has.
        only_asks: whether the client must not begin a new history.
        """
        key = model if self._by_model else ""
        if refused := self._refused(key, only_asks):
            self._outgoing.append((client, refused))
        else:
            if key not in self._histories and key not in self._loading:
                self._loading[key] = self._loaded(folder_of_model(self._config.store, key))
            self._coming[client] = key
        self.wake()

    def _refused(self, key: str, only_asks: bool) -> Refused | None:
        if len(self._clients) + len(self._coming) >= _MAX_CLIENTS:
            return _refusal(f"the service has its maximum of {_MAX_CLIENTS} clients", "busy")
        if key in self._histories or key in self._loading:
            return None
        if only_asks and not file_of(folder_of_model(self._config.store, key)).exists():
            return _refusal(f"no server has named a model {key!r:.200}", "model")
        if len(self._histories) + len(self._loading) >= _MAX_MODELS and not self._has_released():
            return _refusal(f"the service has its maximum of {_MAX_MODELS} models", "busy")
        return None

    def _loaded(self, folder: Path) -> Future[ModelHistory]:
        """Begin to load the history in this folder. The thread does not outlive the process."""
        future = Future[ModelHistory]()
        store = replace(self._config.store, path=str(folder))
        config = replace(self._config, store=store)

        def load() -> None:
            try:
                future.set_result(ModelHistory(config))
            except BaseException as error:
                future.set_exception(error)
            self.wake()

        threading.Thread(target=load, daemon=True).start()
        return future

    def _has_released(self) -> bool:
        """Close the history without a client that was named the longest ago. Return whether there
        was one."""
        in_use = {id(by.history) for by in self._clients.values()}
        for key, history in self._histories.items():
            if id(history) not in in_use and key not in self._coming.values():
                self._histories.pop(key).close()
                return True
        return False

    def _greet(self) -> None:
        """Answer the clients whose histories have been loaded."""
        for key in [key for key, loading in self._loading.items() if loading.done()]:
            try:
                self._histories[key] = self._loading.pop(key).result()
            except StoreError as error:
                refused = _refusal(str(error), "store")
                for client in [client for client, of in self._coming.items() if of == key]:
                    del self._coming[client]
                    self._outgoing.append((client, refused))
        for client, key in [*self._coming.items()]:
            if (history := self._histories.get(key)) is not None:
                del self._coming[client]
                self._histories.move_to_end(key)
                self._clients[client] = Client(history)
                prior = Lengths.of(history.prior)
                self._outgoing.append((client, Welcome(messages.VERSION, history.stats(), prior)))

    def disconnect(self, client: Hashable) -> None:
        """Forget the client's unanswered prompts."""
        self._clients.pop(client, None)
        self._coming.pop(client, None)

    def count_malformed(self, client: Hashable) -> None:
        if (by := self._clients.get(client)) is not None:
            by.history.counts["num_malformed"] += 1

    def receive(self, client: Hashable, message: Predict | Finished | GoesOn) -> None:
        """Take in a client's message. Ignore it if the client is not connected."""
        by = self._clients.get(client)
        if by is None:
            return
        match message:
            case Predict():
                by.queue[message.handle] = Prompt(
                    self._now(), message.text, message.scope, message.asked
                )
                self._bound_queues()
            case Finished():
                self._finish(by, message)
            case GoesOn() if (of := by.embedded.get(message.handle)) is not None:
                of.place = by.history.goes_on(of.record(message), of.place)
        self.wake()

    def step(self) -> list[Outgoing]:
        """Answer new clients, and embed one batch of prompts and predict for it.

        The predictions for each client are in the order in which its prompts came, so that its
        requests reach a scheduler in that order.
        """
        self._greet()
        batch = sorted(self._next_batch(), key=lambda each: each[1])
        vectors = self._embedder.embed([prompt.text for _, _, prompt in batch])
        outgoing, self._outgoing = self._outgoing, []
        return outgoing + [
            (client, self._predicted(self._clients[client], handle, prompt, vector))
            for (client, handle, prompt), vector in zip(batch, vectors, strict=True)
        ]

    def report(self) -> list[Outgoing]:
        """Commit ended answers, and return for each client the state of its model."""
        news = dict[int, News]()
        for history in self._histories.values():
            has_new_prior = history.commit()
            prior = Lengths.of(history.prior) if has_new_prior else None
            news[id(history)] = News(history.stats(), prior)
        return [(client, news[id(by.history)]) for client, by in self._clients.items()]

    def stats(self) -> dict[str, Stats]:
        """Return the counters by model."""
        return {model: history.stats() for model, history in self._histories.items()}

    def close(self) -> None:
        for history in self._histories.values():
            history.close()

    def _bound_queues(self) -> None:
        if sum(len(client.queue) for client in self._clients.values()) > _MAX_QUEUED:
            number, most = max(self._clients.items(), key=lambda each: len(each[1].queue))
            handle, oldest = most.queue.popitem(last=False)
            prior = Lengths.of(most.history.prior)
            self._outgoing.append((number, Predicted(handle, prior)))
            most.history.counts["num_dropped"] += 1
            most.history.counts["num_unrecorded"] += len(oldest.finished)

    def _next_batch(self) -> list[tuple[Hashable, int, Prompt]]:
        # Clients take turns. Under overload each client's newest prompt goes first. The predictions
        # of its oldest prompts are late anyway; these are embedded later, for the history.
        batch: list[tuple[Hashable, int, Prompt]] = []
        longest, in_time_s = 0, self._now() - self._patience_s
        while waiting := [client for client, by in self._clients.items() if by.queue]:
            for client in waiting:
                queue = self._clients[client].queue
                following = next(iter(queue))
                if queue[following].came_s < in_time_s:
                    following = next(reversed(queue))
                longest = max(longest, min(len(queue[following].text), _MAX_READ_CHARS))
                if batch and longest * (len(batch) + 1) > _MAX_BATCH_CHARS:
                    return batch
                batch.append((client, following, queue.pop(following)))
                self._clients.move_to_end(client)
        return batch

    def _predicted(self, by: Client, handle: int, prompt: Prompt, vector: Vector) -> Predicted:
        prompt.vector = by.history.described(vector, prompt.asked)
        prompt.forecast = by.history.forecast(prompt.vector, prompt.scope, prompt.asked.session)
        served = Lengths.of(by.history.served(prompt.forecast))
        prompt.text = ""
        by.embedded[handle] = prompt
        if sum(len(client.embedded) for client in self._clients.values()) > _MAX_HANDLES:
            most = max(self._clients.values(), key=lambda client: len(client.embedded))
            most.embedded.popitem(last=False)
        finished, prompt.finished = prompt.finished, []
        for answer in finished:
            self._finish(by, answer)
        return Predicted(handle, served)

    def _finish(self, by: Client, answer: Finished) -> None:
        if (waiting := by.queue.get(answer.handle)) and len(waiting.finished) < _MAX_ANSWERS:
            waiting.finished.append(answer)
        elif (of := by.embedded.get(answer.handle)) is not None:
            place, of.place = of.place, None
            by.history.record(of.record(answer), of.forecast, of.asked.session, place)
        else:
            by.history.counts["num_unrecorded"] += 1


def _refusal(why: str, because: Literal["model", "store", "busy"]) -> Refused:
    return Refused(messages.VERSION, why, because)
