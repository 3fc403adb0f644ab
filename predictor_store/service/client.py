"""The HTTP process's client of the prediction worker: never blocks its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor_store.predict.asked import NOTHING_ASKED, Asked
from predictor_store.predict.features import excerpt
from predictor_store.service import protocol
from predictor_store.service.link import Link, open_link
from predictor_store.service.supervisor import Supervisor
from sage_sched.config import SageConfig
from sage_sched.distribution import SOURCES, LengthDistribution

logger = logging.getLogger(__name__)

_LATENCY_WINDOW = 1_000
# Each worker counts from its start; stats() adds up all workers.
_TOTALS = (
    "num_recorded", "num_going_on", "num_unrecorded", "num_dropped", "num_malformed", "num_lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is known of an answer's length when its prompt arrives.

    handle: names the answer when its length is reported; None: do not report it. distribution: None
    if nothing is known.
    """

    handle: int | None
    distribution: LengthDistribution | None


class PredictorClient:
    """Used from one event loop's thread. If the worker is slow, hung or dead, requests get the
    prior instead of a prediction, and nothing else changes."""

    def __init__(self, config: SageConfig, model: str = "") -> None:
        """model: whose history it is at a service (predictor.service)."""
        self._config = config
        self._supervisor = Supervisor(lambda: open_link(config, model))
        self._link: Link | None = None
        self._reopened: Link | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, asyncio.Future[Prediction]] = {}
        self._is_silent = False
        self._next_handle = 0
        self._prior: LengthDistribution | None = None
        self._worker_stats: dict[str, Any] = {}
        # Counted by the workers before this one.
        self._past = Counter[str]()
        self._counts = Counter[str]()
        self._latencies_ms = deque[float](maxlen=_LATENCY_WINDOW)

    def start(self) -> None:
        """Blocks until the worker is ready. Raises StoreError, PredictorError."""
        self._attach(self._supervisor.open())

    async def predict(self, text: str, scope: str = "", asked: Asked = NOTHING_ASKED) -> Prediction:
        """Never raises. scope: see History.scope.

        After predictor.deadline_ms the prior is returned, with a handle that is good. After a
        missed deadline, nobody waits for the worker until it says something again.
        """
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        self._bind(loop)
        handle = self._next_handle
        self._next_handle += 1
        answer: asyncio.Future[Prediction] = loop.create_future()
        self._waiting[handle] = answer
        deadline = loop.call_later(
            self._config.predictor.deadline_ms / 1e3, self._miss_deadline, handle
        )
        message = {
            "predict": handle,
            "text": excerpt(text),
            "scope": scope[: protocol.MAX_SCOPE_CHARS],
            "asked": asked.as_fields(),
        }
        try:
            if self._send(message):
                if self._is_silent:
                    self._miss_deadline(handle)
                prediction = await answer
            else:
                self._counts["num_unsent"] += 1
                prediction = Prediction(None, self._prior)
        finally:
            deadline.cancel()
            self._waiting.pop(handle, None)
        self._latencies_ms.append((time.perf_counter() - started) * 1e3)
        source = prediction.distribution.source if prediction.distribution else "none"
        self._counts[f"num_predicted_{source}"] += 1
        return prediction

    def finished(self, handle: int, input_tokens: int, output_tokens: int, censored: bool) -> None:
        """An answer has ended; call it for each answer to a prompt. Never blocks, never raises."""
        message = {
            "finished": handle,
            "input_tokens": int(input_tokens),
            "output_tokens": int(output_tokens),
            "censored": bool(censored),
        }
        if not self._send(message):
            self._counts["num_unrecorded"] += 1

    def goes_on(self, handle: int, input_tokens: int, output_tokens: int) -> None:
        """The answer has so many tokens already. Never blocks, never raises; it may be lost."""
        said = {"input_tokens": int(input_tokens), "output_tokens": int(output_tokens)}
        self._send({"goes_on": handle, **said})

    def stats(self) -> dict[str, Any]:
        """Counters since start.

        As of now: the latencies, quality (RollingQuality.summary), num_awaited (predictions under
        way), num_records and num_unwritten. A service counts for all clients of the model.
        """
        latencies = self._latencies_ms or [0.0]
        counts = dict.fromkeys([f"num_predicted_{source}" for source in (*SOURCES, "none")], 0)
        counts |= {"num_deadline_misses": 0, "num_unsent": 0, "num_worker_restarts": 0}
        counts |= self._counts
        totals = _totals(self._worker_stats)
        counts |= {name: totals[name] + self._past[name] + self._counts[name] for name in _TOTALS}
        return counts | {
            "num_records": self._worker_stats.get("num_records", 0),
            "num_unwritten": self._worker_stats.get("num_unwritten", 0),
            "http_process": os.getpid(),
            "quality": self._worker_stats.get("quality", {}),
            "num_awaited": len(self._waiting),
            "worker_alive": int(self._link is not None),
            "prediction_latency_p50_ms": float(np.quantile(latencies, 0.5)),
            "prediction_latency_p99_ms": float(np.quantile(latencies, 0.99)),
        }

    def close(self) -> None:
        """Blocks until the worker has written what it has."""
        self._closed = True
        self._supervisor.close()
        if (link := self._detach()) is not None:
            link.close()

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        # start() came before any loop. SGLang has one, tests have several.
        if loop is self._loop:
            return
        self._loop = loop
        if self._link is not None:
            self._watch(self._link)
        else:
            self._attach_reopened()

    def _attach(self, link: Link) -> None:
        self._link = link
        self._is_silent = False
        self._prior = protocol.decode_distribution(link.first["prior"])
        stats = link.first["ready"]
        if stats["process"] != self._worker_stats.get("process"):
            self._past += _totals(self._worker_stats)
        self._worker_stats = stats
        if self._loop is not None:
            self._watch(link)

    def _watch(self, link: Link) -> None:
        assert self._loop is not None
        self._loop.add_reader(link.socket.fileno(), self._on_readable)
        if link.has_unsent:
            self._loop.add_writer(link.socket.fileno(), self._on_writable)

    def _detach(self) -> Link | None:
        """Stops using the worker. Requests that wait for it get the prior."""
        link, self._link = self._link, None
        if link is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(link.socket.fileno())
            self._loop.remove_writer(link.socket.fileno())
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(Prediction(None, self._prior))
        return link

    def _send(self, message: dict[str, Any]) -> bool:
        if self._link is None:
            return False
        try:
            sent = self._link.say(message)
        except OSError:
            self._lose_worker()
            return False
        if self._link.has_unsent and self._loop is not None:
            self._loop.add_writer(self._link.socket.fileno(), self._on_writable)
        return sent

    def _on_writable(self) -> None:
        assert self._link is not None
        assert self._loop is not None
        try:
            self._link.flush()
            if not self._link.has_unsent:
                self._loop.remove_writer(self._link.socket.fileno())
        except OSError:
            self._lose_worker()

    def _on_readable(self) -> None:
        assert self._link is not None
        try:
            for message in self._link.messages():
                self._take(message)
        except (OSError, ValueError):
            self._lose_worker()

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"predicted": int(handle), "distribution": encoded}:
                self._is_silent = False
                answer = self._waiting.get(handle)
                # Past its deadline the request has gone on.
                if answer is not None and not answer.done():
                    distribution = protocol.decode_distribution(encoded)
                    answer.set_result(Prediction(handle, distribution))
            case {"stats": dict(stats), **more}:
                if "prior" in more:
                    self._prior = protocol.decode_distribution(more["prior"])
                self._worker_stats = stats

    def _miss_deadline(self, handle: int) -> None:
        answer = self._waiting.get(handle)
        if answer is not None and not answer.done():
            self._is_silent = True
            self._counts["num_deadline_misses"] += 1
            answer.set_result(Prediction(handle, self._prior))

    def _lose_worker(self) -> None:
        link = self._detach()
        if link is not None and not self._closed:
            logger.error("the prediction worker has died: requests get the prior until it is back")
            threading.Thread(target=self._reopen, args=(link,), daemon=True).start()

    def _reopen(self, lost: Link) -> None:
        # In a thread of its own: opening a worker blocks.
        self._reopened = self._supervisor.reopen(lost)
        # Without a running loop, the next prediction finds it.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._attach_reopened)

    def _attach_reopened(self) -> None:
        link, self._reopened = self._reopened, None
        if link is not None:
            self._counts["num_worker_restarts"] += 1
            self._attach(link)


def _totals(stats: dict[str, Any]) -> Counter[str]:
    return Counter({name: stats.get(name, 0) for name in _TOTALS})
