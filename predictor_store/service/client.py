"""Lets an HTTP process ask the prediction worker, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor_store.predict.asked import NOTHING_ASKED, Asked
from predictor_store.predict.features import excerpt
from predictor_store.predict.model import Stats
from predictor_store.predict.regression import GeneralLength
from predictor_store.service import messages
from predictor_store.service.link import Link, connect_worker, start_worker
from predictor_store.service.messages import Finished, GoesOn, News, Predict, Predicted
from predictor_store.service.supervisor import Supervisor
from sage_sched.app.config import SageConfig
from sage_sched.distribution import SOURCES, LengthDistribution

logger = logging.getLogger(__name__)

_LATENCY_WINDOW = 1_000
# A server waits this long for a service, then starts without it.
_SERVICE_PATIENCE_S = 3.0
# Each worker counts from its own start; stats() adds up the counts of all workers.
_TOTALS = (
    "num_recorded", "num_going_on", "num_unrecorded", "num_dropped", "num_malformed", "num_lost",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for an answer when its prompt arrives.

    handle: names the answer when its length is reported. None if it must not be reported.
    distribution: None if nothing is known.
    """

    handle: int | None
    distribution: LengthDistribution | None


class PredictorClient:
    """Asks the prediction worker. Used from one event loop's thread.

    If the worker is slow, hung or dead, requests get the prior instead of a prediction, and nothing
    else changes.
    """

    def __init__(self, config: SageConfig, model: str = "") -> None:
        """Make a client. model: names the model's history at a service (predictor.service)."""
        self._config = config
        self._is_own = not config.predictor.service
        self._supervisor = Supervisor(
            lambda: start_worker(config) if self._is_own else connect_worker(config, model),
            self._attach,
            self._lose,
        )
        self._link: Link | None = None
        # The loop that reads, the link that it reads, and a descriptor for it.
        self._reading: tuple[asyncio.AbstractEventLoop, Link, int] | None = None
        self._waiting: dict[int, asyncio.Future[Prediction]] = {}
        self._is_silent = False
        self._next_handle = 0
        self._prior: LengthDistribution | None = None
        self._worker_stats: Stats | None = None
        # Counts of all previous workers.
        self._past = Counter[str]()
        self._counts = Counter[str]()
        self._latencies_ms = deque[float](maxlen=_LATENCY_WINDOW)

    def start(self) -> None:
        """Block until the worker is ready. Raises StoreError, PredictorError.

        A missing service is not an error: until it answers, requests get general lengths.
        """
        if self._is_own:
            self._supervisor.start()
            return
        general = GeneralLength.shipped(self._config.predictor.encoder)
        self._prior = LengthDistribution.from_samples(general.of_any_prompt(), "prior")
        self._supervisor.seek(_SERVICE_PATIENCE_S)

    @property
    def prior(self) -> LengthDistribution | None:
        """Return the distribution for any prompt; None if nothing is known."""
        return self._prior

    async def predict(self, text: str, scope: str = "", asked: Asked = NOTHING_ASKED) -> Prediction:
        """Return the prediction for a prompt. Never raises. scope: a name of asked.Scope.

        After predictor.deadline_ms the prior is returned, with a valid handle. After a missed
        deadline, no request waits for the worker until it sends a message again.
        """
        started = time.perf_counter()
        self._read_here()
        loop = asyncio.get_running_loop()
        handle = self._next_handle
        self._next_handle += 1
        answer: asyncio.Future[Prediction] = loop.create_future()
        self._waiting[handle] = answer
        deadline = loop.call_later(
            self._config.predictor.deadline_ms / 1e3, self._miss_deadline, handle
        )
        message = Predict(
            handle,
            messages.valid(excerpt(text)),
            messages.valid(scope[: messages.MAX_SCOPE_CHARS]),
            asked,
        )
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

    def finished(
        self,
        handle: int,
        input_tokens: int,
        output_tokens: int,
        censored: bool,
        stopped: bool = False,
    ) -> None:
        """Report an ended answer; call it for each answer to a prompt. Never blocks, never raises.

        stopped: see asked.Scope.
        """
        answer = Finished(handle, int(input_tokens), int(output_tokens), bool(censored), stopped)
        if not self._send(answer):
            self._counts["num_unrecorded"] += 1

    def goes_on(self, handle: int, input_tokens: int, output_tokens: int) -> None:
        """Report that an answer has this many tokens already. Never blocks, never raises. The
        report may be lost."""
        self._send(GoesOn(handle, int(input_tokens), int(output_tokens)))

    def stats(self) -> dict[str, Any]:
        """Return the counters since the start, and current values.

        Current values: the latencies, quality (RollingQuality.summary), num_awaited (pending
        predictions), num_records and num_unwritten. The numbers of a service are for all its
        clients with this model.
        """
        latencies = self._latencies_ms or [0.0]
        counts = dict.fromkeys([f"num_predicted_{source}" for source in SOURCES], 0)
        counts |= {"num_deadline_misses": 0, "num_unsent": 0, "num_worker_restarts": 0}
        counts |= self._counts
        of_worker = self._worker_stats or Stats(0)
        totals = _totals(of_worker)
        counts |= {name: totals[name] + self._past[name] + self._counts[name] for name in _TOTALS}
        return counts | {
            "num_records": of_worker.num_records,
            "num_unwritten": of_worker.num_unwritten,
            "http_process": os.getpid(),
            "quality": of_worker.quality,
            "num_awaited": len(self._waiting),
            "worker_alive": int(self._link is not None),
            "prediction_latency_p50_ms": float(np.quantile(latencies, 0.5)),
            "prediction_latency_p99_ms": float(np.quantile(latencies, 0.99)),
        }

    def close(self) -> None:
        """Block until the worker has written its records."""
        self._supervisor.close()
        self._lose()

    def _send(self, message: Predict | Finished | GoesOn) -> bool:
        link = self._link
        is_sent = link is not None and link.say(message)
        self._take_all()
        return is_sent

    def _miss_deadline(self, handle: int) -> None:
        answer = self._waiting.get(handle)
        if answer is not None and not answer.done():
            self._is_silent = True
            self._counts["num_deadline_misses"] += 1
            answer.set_result(Prediction(handle, self._prior))

    def _read_here(self) -> None:
        """Let the running loop read from the present worker. Requests that wait for a previous
        worker get the prior."""
        loop, link = asyncio.get_running_loop(), self._link
        if self._reading is not None:
            was_in, was, fd = self._reading
            if (was_in, was) == (loop, link):
                return
            if not was_in.is_closed():
                was_in.remove_reader(fd)
            os.close(fd)
            self._reading = None
            if was is not link:
                for answer in self._waiting.values():
                    if not answer.done():
                        answer.set_result(Prediction(None, self._prior))
        if link is not None and (fd := link.readable_fd()) >= 0:
            loop.add_reader(fd, self._take_all)
            self._reading = loop, link, fd

    def _take_all(self) -> None:
        if (link := self._link) is None:
            return
        try:
            for message in link.heard():
                self._take(message)
        except ValueError as error:
            logger.error("closed the connection to the prediction worker: %s", error)
            link.kill()

    def _take(self, message: messages.ToClient) -> None:
        match message:
            case Predicted(handle, lengths):
                self._is_silent = False
                # A request whose deadline has passed no longer waits.
                answer = self._waiting.get(handle)
                if answer is not None and not answer.done():
                    answer.set_result(Prediction(handle, lengths.read() if lengths else None))
            case News(stats, prior):
                self._worker_stats = stats
                if prior is not None:
                    self._prior = prior.read()

    # The supervisor calls these in a thread of its own.

    def _attach(self, link: Link) -> None:
        stats, before = link.first.stats, self._worker_stats
        self._counts["num_worker_restarts"] += before is not None
        if before is not None and stats.process != before.process:
            self._past += _totals(before)
        self._worker_stats = stats
        prior = link.first.prior
        self._prior = prior.read() if prior else None
        self._is_silent = False
        self._link = link
        self._in_loop()

    def _lose(self) -> None:
        self._link = None
        self._in_loop()

    def _in_loop(self) -> None:
        """Call _read_here in the loop that reads, if there is one."""
        if (reading := self._reading) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                reading[0].call_soon_threadsafe(self._read_here)


def _totals(stats: Stats) -> Counter[str]:
    return Counter({name: getattr(stats, name) for name in _TOTALS})
