"""What a prediction worker does: messages of its clients come in, messages to them go out.

It knows no socket; see predictor_store.service.server. One worker serves one server or many.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from predictor_store.predict.asked import Asked, Scope
from predictor_store.predict.embedder import Embedder
from predictor_store.predict.features import excerpt
from predictor_store.predict.history import Place
from predictor_store.predict.model import ModelHistory, folder_of_model
from predictor_store.predict.quality import Forecast
from predictor_store.service import protocol
from predictor_store.store.file import Record, StoreError
from predictor_store.store.store import file_of
from sage_sched.config import SageConfig

# About 128 tokens, the most that MiniLM reads of a prompt.
_MAX_READ_CHARS = 600
# A batch of MiniLM takes as long as its longest prompt times their number, and each prompt waits
# for all of it. 20 short prompts take as long as 4 long ones.
_MAX_BATCH_CHARS = 4 * _MAX_READ_CHARS
# Over all clients; beyond it the client that has most loses its oldest, and is told so.
_MAX_QUEUED = 1_000
# 3.1 KB each; an answer that ends after so many later prompts is not recorded.
_MAX_HANDLES = 20_000
# To one prompt, before it is embedded.
_MAX_ANSWERS = 1_000
# 20 MB each when full.
_MAX_MODELS = 64
_MAX_INT = 2**31

Vector = NDArray[np.float32]
# Of an answer: input tokens, output tokens, whether it was cut off, and whether what its client
# asked for beside its words has ended it.
Answer = tuple[int, int, bool, bool]
# A message, and the client that it is for.
Outgoing = tuple[int, dict[str, Any]]


@dataclass(slots=True)
class Prompt:
    """What a client asked. came_s: when. finished: answers that ended before it was embedded.
    vector, forecast: set once it is. place: where its answer's record is while the answer goes
    on."""

    came_s: float
    text: str
    scope: str
    asked: Asked
    finished: list[Answer] = field(default_factory=list)
    vector: Vector = field(default_factory=lambda: np.empty(0, np.float32))
    forecast: Forecast = field(default_factory=Forecast)
    place: Place | None = None

    def record(self, answer: Answer) -> Record:
        num_in, num_out, cut, stopped = answer
        scope = Scope.read(self.scope).stopped().name if stopped else self.scope
        return Record(self.vector, num_out, num_in, cut, "history", scope)


@dataclass(slots=True)
class Client:
    """history: its model's. queue, embedded: by handle, oldest first."""

    history: ModelHistory
    queue: OrderedDict[int, Prompt] = field(default_factory=OrderedDict)
    embedded: OrderedDict[int, Prompt] = field(default_factory=OrderedDict)


class Worker:
    """by_model: each model that clients name has its own history; otherwise all share one. now: the
    clock, in seconds."""

    def __init__(
        self,
        config: SageConfig,
        *,
        by_model: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StoreError, before the seconds that loading the encoder takes."""
        self._config = config
        self._by_model = by_model
        self._now = now
        # Prompts that have waited longer come last: their prediction would be late.
        self._patience_s = config.predictor.deadline_ms / 1e3 / 2
        # The one that was named last is last.
        self._histories = OrderedDict[str, ModelHistory]()
        if not by_model:
            self._histories[""] = ModelHistory(config)
        self._embedder = Embedder(config.predictor.encoder, num_threads=1)
        self._embedder.embed(["The first call is slower than all others."])
        # The first is to be served next.
        self._clients: OrderedDict[int, Client] = OrderedDict()
        self._dropped: list[Outgoing] = []
        # Set whenever a client has said something.
        self.heard = asyncio.Event()

    @property
    def busy(self) -> bool:
        return any(by.queue for by in self._clients.values())

    def connect(self, client: int, model: str = "", *, only_asks: bool = False) -> dict[str, Any]:
        """The answer to the client's hello. If it is refused, it is not connected.

        A model's history is loaded for its first client. client: a number that no other client has.
        only_asks: it must not begin a new history.
        """
        key = model if self._by_model else ""
        if (history := self._histories.get(key)) is None:
            folder = folder_of_model(self._config.store, model)
            if only_asks and not file_of(folder).exists():
                return protocol.refusal(f"no server has told of a model {model!r:.200}", "model")
            if len(self._histories) >= _MAX_MODELS and not self._has_released():
                return protocol.refusal(f"the service serves {_MAX_MODELS} models, no more", "busy")
            try:
                store = replace(self._config.store, path=str(folder))
                history = self._histories[key] = ModelHistory(replace(self._config, store=store))
            except StoreError as error:
                return protocol.refusal(str(error), "store")
        self._histories.move_to_end(key)
        self._clients[client] = Client(history)
        prior = protocol.encode_distribution(history.prior)
        return {"ready": history.stats(), "prior": prior, "version": protocol.VERSION}

    def _has_released(self) -> bool:
        """Closes the history that was named the longest ago and has no client."""
        in_use = {id(by.history) for by in self._clients.values()}
        for key, history in self._histories.items():
            if id(history) not in in_use:
                self._histories.pop(key).close()
                return True
        return False

    def disconnect(self, client: int) -> None:
        """Forgets what it has asked and not been told yet."""
        self._clients.pop(client, None)

    def receive(self, client: int, message: dict[str, Any] | None) -> None:
        """A message of a client; None for a line that is none. Ignored if it is not connected."""
        by = self._clients.get(client)
        if by is None:
            return
        self.heard.set()
        match message:
            case {"predict": int(handle), "text": str(text), "scope": str(scope), **more} if (
                len(scope) <= protocol.MAX_SCOPE_CHARS
            ):
                try:
                    asked = msgspec.convert(more.get("asked", {}), Asked)
                except ValueError:
                    by.history.counts["num_malformed"] += 1
                    return
                by.queue[handle] = Prompt(self._now(), excerpt(text), scope, asked)
                self._bound_queues()
            case {
                "finished": int(handle), "input_tokens": int(num_in), "output_tokens": int(num_out),
                "censored": bool(cut), **more,
            } if _are_counts(num_in, num_out):  # fmt: skip
                self._finish(by, handle, (num_in, num_out, cut, more.get("stopped") is True))
            case {
                "goes_on": int(handle), "input_tokens": int(num_in), "output_tokens": int(num_out),
            } if _are_counts(num_in, num_out):  # fmt: skip
                if (of := by.embedded.get(handle)) is not None:
                    record = of.record((num_in, num_out, True, False))
                    of.place = by.history.goes_on(record, of.place)
            case _:
                by.history.counts["num_malformed"] += 1

    def step(self) -> list[Outgoing]:
        """Embeds one batch of prompts and predicts for it, each client's in their order of arrival,
        which their requests keep on the way to a scheduler."""
        batch = sorted(self._next_batch(), key=lambda each: each[1])
        vectors = self._embedder.embed([prompt.text for _, _, prompt in batch])
        dropped, self._dropped = self._dropped, []
        return dropped + [
            (client, self._predicted(self._clients[client], handle, prompt, vector))
            for (client, handle, prompt), vector in zip(batch, vectors, strict=True)
        ]

    def report(self) -> list[Outgoing]:
        """Commits ended answers, and returns the news of each client's model."""
        messages: dict[int, dict[str, Any]] = {}
        for history in self._histories.values():
            if (news := history.report()) is not None:
                stats, has_new_prior = news
                message = messages[id(history)] = {"stats": stats}
                if has_new_prior:
                    message["prior"] = protocol.encode_distribution(history.prior)
        clients = self._clients.items()
        return [(c, messages[id(by.history)]) for c, by in clients if id(by.history) in messages]

    def close(self) -> None:
        for history in self._histories.values():
            history.close()

    def _bound_queues(self) -> None:
        if sum(len(client.queue) for client in self._clients.values()) > _MAX_QUEUED:
            number, most = max(self._clients.items(), key=lambda each: len(each[1].queue))
            handle, oldest = most.queue.popitem(last=False)
            prior = protocol.encode_distribution(most.history.prior)
            self._dropped.append((number, {"predicted": handle, "distribution": prior}))
            most.history.counts["num_dropped"] += 1
            most.history.counts["num_unrecorded"] += len(oldest.finished)

    def _next_batch(self) -> list[tuple[int, int, Prompt]]:
        # Clients take turns. Under overload each client's newest prompt goes first: the oldest are
        # late anyway, and are embedded later, for the history.
        batch: list[tuple[int, int, Prompt]] = []
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

    def _predicted(self, by: Client, handle: int, prompt: Prompt, vector: Vector) -> dict[str, Any]:
        prompt.vector = by.history.described(vector, prompt.asked)
        prompt.forecast = by.history.forecast(prompt.vector, prompt.scope, prompt.asked.session)
        served = protocol.encode_distribution(by.history.served(prompt.forecast))
        prompt.text = ""
        by.embedded[handle] = prompt
        if sum(len(client.embedded) for client in self._clients.values()) > _MAX_HANDLES:
            most = max(self._clients.values(), key=lambda client: len(client.embedded))
            most.embedded.popitem(last=False)
        finished, prompt.finished = prompt.finished, []
        for answer in finished:
            self._finish(by, handle, answer)
        return {"predicted": handle, "distribution": served}

    def _finish(self, by: Client, handle: int, answer: Answer) -> None:
        if handle in by.queue and len(by.queue[handle].finished) < _MAX_ANSWERS:
            by.queue[handle].finished.append(answer)
        elif handle in by.embedded:
            of = by.embedded[handle]
            place, of.place = of.place, None
            by.history.record(of.record(answer), of.forecast, of.asked.session, place)
        else:
            by.history.counts["num_unrecorded"] += 1


def _are_counts(*values: int) -> bool:
    return all(0 <= value < _MAX_INT for value in values)
