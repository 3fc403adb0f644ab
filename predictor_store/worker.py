"""The prediction worker: a process that owns the embedder, the history and the store.

Run by predictor_store.client as `python -m predictor_store.worker FD CONFIG`: a connected stream
socket, and the sections store and predictor as a JSON object. See predictor_store.protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor_store import predictor, protocol
from predictor_store.embedder import Embedder, dimension, fingerprint
from predictor_store.history import Fitting, History
from predictor_store.store import Store
from predictor_store.store_file import Record, StoreError
from sage_sched.config import SageConfig

# About 128 tokens, the most that MiniLM reads of a prompt.
_MAX_READ_CHARS = 600
# There a batch costs what its characters cost, padded to its longest prompt, and everyone in it
# waits for all of it: 20 short prompts in the time of 4 long ones.
_MAX_BATCH_CHARS = 4 * _MAX_READ_CHARS
_MAX_QUEUED = 1_000
# 3.1 KB each: when that many have come after it, an answer that finishes is not recorded.
_MAX_HANDLES = 20_000
_REPORT_SECONDS = 1.0
_MAX_INT = 2**31
_NICENESS = 19


class Answer(NamedTuple):
    """How long an answer became."""

    input_tokens: int
    output_tokens: int
    censored: bool


@dataclass(slots=True)
class PendingPrompt:
    """A prompt that waits for its vector, and the answers to it that ended before it came."""

    handle: int
    text: str
    scope: str
    finished: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Embedded:
    """What a finish needs of its prompt."""

    vector: NDArray[np.float32]
    scope: str
    prompt: str | None


class Worker:
    """Takes messages in, gives messages out; knows no socket."""

    def __init__(self, config: SageConfig) -> None:
        """Raises StoreError. The store comes first: a refusal need not wait for the model."""
        self._config = config
        encoder = config.predictor.encoder
        self._store = Store(config.store, fingerprint(encoder), dimension(encoder))
        self._history = History.of_encoder(encoder, config.store.capacity)
        for record in self._store.load():
            self._remember(record)
        self._history.fit()
        self._fitter = ThreadPoolExecutor(1)
        self._fit: tuple[Fitting, Future[Any]] | None = None
        self._embedder = Embedder(encoder, num_threads=1)
        self._embedder.embed(["The first call is slower than all others."])
        # In order of arrival, by handle.
        self._queue: dict[int, PendingPrompt] = {}
        self._embedded: OrderedDict[int, Embedded] = OrderedDict()
        self._counts = Counter(num_recorded=0, num_unrecorded=0, num_dropped=0, num_malformed=0)
        self._reported: dict[str, Any] = {}
        self._prior = predictor.prior(self._history, config.predictor)
        self._num_new = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def ready(self) -> dict[str, Any]:
        """The first message."""
        self._reported = self._stats()
        return {"ready": self._reported, "prior": protocol.encode_distribution(self._prior)}

    def receive(self, message: dict[str, Any] | None) -> None:
        match message:
            case {"predict": int(handle), "text": str(text), "scope": str(scope)}:
                self._queue[handle] = PendingPrompt(handle, text, scope)
                if len(self._queue) > _MAX_QUEUED:
                    oldest = self._queue.pop(next(iter(self._queue)))
                    self._counts["num_dropped"] += 1
                    self._counts["num_unrecorded"] += len(oldest.finished)
            case {
                "finished": int(handle),
                "input_tokens": int(num_in),
                "output_tokens": int(num_out),
                "censored": bool(cut),
            } if 0 <= min(num_in, num_out) <= max(num_in, num_out) < _MAX_INT:
                self._finish(handle, Answer(num_in, num_out, cut))
            case _:
                self._counts["num_malformed"] += 1

    def step(self) -> list[dict[str, Any]]:
        """Embeds one batch and predicts for it."""
        batch = self._next_batch()
        vectors = self._embedder.embed([request.text for request in batch])
        answers = []
        for request, vector in zip(batch, vectors, strict=True):
            found = predictor.predict(self._history, vector, self._config.predictor, request.scope)
            distribution = protocol.encode_distribution(found)
            answers.append({"predicted": request.handle, "distribution": distribution})
            prompt = request.text if self._config.store.keep_prompts else None
            self._embedded[request.handle] = Embedded(vector, request.scope, prompt)
            if len(self._embedded) > _MAX_HANDLES:
                self._embedded.popitem(last=False)
            for answer in request.finished:
                self._finish(request.handle, answer)
        return answers

    def report(self) -> dict[str, Any] | None:
        """Commits what has finished; the message about it, None where nothing is new."""
        self._store.flush()
        self._refit()
        stats = self._stats()
        if stats == self._reported:
            return None
        self._reported = stats
        message: dict[str, Any] = {"stats": stats}
        if self._num_new * 100 > len(self._history):
            self._prior = predictor.prior(self._history, self._config.predictor)
            self._num_new = 0
            message["prior"] = protocol.encode_distribution(self._prior)
        return message

    def close(self) -> None:
        self._fitter.shutdown(cancel_futures=True)
        self._store.close()

    def _refit(self) -> None:
        """In a thread of its own: numpy lets go of the interpreter, and predictions go on."""
        if self._fit is not None and self._fit[1].done():
            fitting, future = self._fit
            self._fit = None
            self._history.install(fitting, future.result())
        if self._fit is None and (stale := self._history.fitting()) is not None:
            self._fit = stale, self._fitter.submit(stale.fit)

    def _next_batch(self) -> list[PendingPrompt]:
        # Newest first: when more comes than can be embedded, the oldest are past their deadline
        # anyway. Theirs are still embedded when there is time, for the history.
        batch: list[PendingPrompt] = []
        longest = 0
        while self._queue:
            newest = self._queue[next(reversed(self._queue))]
            longest = max(longest, min(len(newest.text), _MAX_READ_CHARS))
            if batch and longest * (len(batch) + 1) > _MAX_BATCH_CHARS:
                break
            batch.append(self._queue.pop(newest.handle))
        return batch

    def _finish(self, handle: int, answer: Answer) -> None:
        if handle in self._queue:
            self._queue[handle].finished.append(answer)
        elif handle in self._embedded:
            of = self._embedded[handle]
            record = Record(
                of.vector,
                answer.output_tokens,
                answer.input_tokens,
                answer.censored,
                "history",
                of.prompt,
                of.scope,
            )
            self._remember(record)
            self._store.add(record)
            self._num_new += 1
            self._counts["num_recorded"] += 1
        else:
            self._counts["num_unrecorded"] += 1

    def _remember(self, record: Record) -> None:
        self._history.add(
            record.vector, record.output_tokens, record.censored, record.origin, record.scope
        )

    def _stats(self) -> dict[str, Any]:
        return {
            **self._counts,
            "num_records": len(self._history),
            "num_unwritten": self._store.num_unwritten,
            "num_lost": self._store.num_lost,
        }


def serve(worker: Worker, connection: socket.socket) -> None:
    """Until the other side hangs up."""
    reader = protocol.LineReader()
    connection.sendall(protocol.encode(worker.ready()))
    next_report = time.monotonic() + _REPORT_SECONDS
    while True:
        wait = 0.0 if worker.busy else max(next_report - time.monotonic(), 0.0)
        if select.select([connection], [], [], wait)[0]:
            # As many as have queued up while the last batch ran.
            piece = connection.recv(1 << 20)
            if not piece:
                return
            for message in reader.feed(piece):
                worker.receive(message)
        for answer in worker.step():
            connection.sendall(protocol.encode(answer))
        if time.monotonic() >= next_report:
            next_report = time.monotonic() + _REPORT_SECONDS
            if news := worker.report():
                connection.sendall(protocol.encode(news))


def main() -> None:
    # Ctrl-C goes to the whole process group; the server hangs up when it is through.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    config = SageConfig.parse(json.loads(sys.argv[2]))
    try:
        worker = Worker(config)
    except StoreError as error:
        connection.sendall(protocol.encode({"refused": str(error)}))
        return
    # From here on the engine goes first: on a host whose cores are all busy, embedding beside it at
    # equal rank costs it a third of its throughput (`sage-sched bench`, 2 cores), and gains
    # nothing. Not before: the server waits for this process to be ready.
    os.nice(_NICENESS)
    try:
        # The server may die while something is sent to it.
        with contextlib.suppress(OSError):
            serve(worker, connection)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
