"""Holds a worker's state for one model: its store, its history, its sessions and its forecasts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import predictor
from predictor_store.predict.asked import NEW_SESSION, NUM_FEATURES, Asked, Scope, Session
from predictor_store.predict.embedder import dimension, fingerprint
from predictor_store.predict.history import Fitting, History, Place
from predictor_store.predict.quality import WINDOW, Forecast, RollingQuality
from predictor_store.predict.regression import GeneralLength
from predictor_store.predict.threshold import predict_by_threshold
from predictor_store.store.file import Record
from predictor_store.store.store import Store, folder_of
from sage_sched.app.config import SageConfig, StoreConfig
from sage_sched.distribution import LengthDistribution

logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 150
_MAX_SESSIONS = 10_000
_NICENESS = 19
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


def folder_of_model(config: StoreConfig, model: str) -> Path:
    """Return the folder of a service's store for this model."""
    name = quote(model, safe=" ", errors="surrogatepass")
    if len(name) > _MAX_NAME_CHARS:
        name = name[:_MAX_NAME_CHARS] + hashlib.sha256(name.encode("ascii")).hexdigest()[:16]
    # The prefix keeps the name from being ".", ".." or the name of a file of the store.
    return folder_of(config) / f"model {name}"


class Stats(msgspec.Struct, frozen=True):
    """Counters since the process began, except num_records and num_unwritten, which are current.

    quality: see RollingQuality.summary.
    """

    process: int
    num_records: _Count = 0
    num_unwritten: _Count = 0
    num_recorded: _Count = 0
    num_going_on: _Count = 0
    num_unrecorded: _Count = 0
    num_dropped: _Count = 0
    num_malformed: _Count = 0
    num_lost: _Count = 0
    quality: dict[str, bool | _Count | float] = {}


class ModelHistory:
    """Predicts and records for one model. Used by one thread at a time."""

    def __init__(self, config: SageConfig) -> None:
        """Open the store of the configuration. Raises StoreError."""
        self._config = config
        encoder = config.predictor.encoder
        self._store = Store(config.store, fingerprint(encoder), dimension(encoder))
        try:
            self._history = History.of_encoder(
                encoder, config.store.capacity, GeneralLength.shipped(encoder)
            )
            self._history.load(self._store.load())
        except BaseException:
            self._store.close()
            raise
        self._history.fit()
        # The engine has priority. On Linux, nice() affects only the calling thread.
        self._fitter = ThreadPoolExecutor(1, initializer=lambda: os.nice(_NICENESS))
        self._fit: tuple[Fitting, Future[Any]] | None = None
        # Worker increases the counters of clients' messages.
        names = ("num_recorded", "num_going_on", "num_unrecorded", "num_dropped", "num_malformed")
        self.counts = Counter(dict.fromkeys(names, 0))
        self.prior = predictor.prior(self._history)
        self._num_new = 0
        self._quality = RollingQuality()
        # The session with the newest answer is last.
        self._sessions = OrderedDict[str, Session]()

    def described(self, vector: NDArray[np.float32], asked: Asked) -> NDArray[np.float32]:
        """Return the prompt's vector with Asked.features."""
        session = self._sessions.get(asked.session, NEW_SESSION)
        return np.append(vector[:-NUM_FEATURES], asked.features(session))

    def forecast(self, vector: NDArray[np.float32], scope: str, session: str = "") -> Forecast:
        """Return the forecast for a vector of described(). scope: a name of asked.Scope. session:
        see Asked."""
        if threshold := self._config.predictor.threshold:
            said = predict_by_threshold(self._history, vector, threshold)
            return Forecast(said or self.prior, self.prior)
        said = predictor.predict(self._history, vector, scope)
        if said is not None:
            lengths = self._sessions.get(session, NEW_SESSION).lengths
            said = predictor.within_session(said, lengths)
        return Forecast(said, self.prior)

    def served(self, forecast: Forecast) -> LengthDistribution | None:
        """Return the distribution for the request. While predictions are worse than the blind
        distribution, return that one."""
        return forecast.blind if self._quality.widened else forecast.said

    def goes_on(self, record: Record, place: Place | None) -> Place | None:
        """Record that an answer has this many tokens and is still growing. Return the place of its
        record.

        Short answers end first. Without this, a young history would know only short answers, and
        its predictions would be too short.

        record: a censored record. place: the result of the previous goes_on() for this answer.
        """
        self.counts["num_going_on"] += 1
        if place is not None:
            return place if self._history.amend(place, record, unfinished=True) else None
        return self._history.add(record, unfinished=True)

    def record(
        self, record: Record, forecast: Forecast, session: str, place: Place | None = None
    ) -> None:
        """Record an ended answer. forecast: the result of forecast(). session: see Asked. place:
        the result of the last goes_on()."""
        if session:
            had = self._sessions.pop(session, NEW_SESSION)
            self._sessions[session] = had.after(
                record.input_tokens, record.output_tokens, cut=record.censored
            )
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        # Predictions of cut answers are not judged, because the full length is unknown. Predictions
        # of answers that clients can end at will are judged only if enough of the same scope have
        # been seen; otherwise one client could spoil the figures.
        is_judged = not record.censored and self._history.knows(Scope.read(record.scope))
        if is_judged and self._quality.add(forecast, record.output_tokens):
            if self._quality.widened:
                logger.warning(
                    "predictions of %d answers were worse than none: until they are better, "
                    "requests get the distribution of all lengths", WINDOW,
                )  # fmt: skip
            else:
                logger.warning("predictions are better than none again, and are used")
        if place is None or not self._history.amend(place, record):
            self._history.add(record)
        self._store.add(record)
        self._num_new += 1
        self.counts["num_recorded"] += 1

    def commit(self) -> bool:
        """Write the ended answers. Return whether the prior has changed."""
        self._store.flush()
        self._refit()
        if self._num_new * 100 <= len(self._history):
            return False
        self._store.note("quality", json.dumps(self._quality.summary()))
        self.prior = predictor.prior(self._history)
        self._num_new = 0
        return True

    def stats(self) -> Stats:
        return Stats(
            process=os.getpid(),
            **self.counts,
            num_records=len(self._history),
            num_unwritten=self._store.num_unwritten,
            num_lost=self._store.num_lost,
            quality=self._quality.summary(),
        )

    def close(self) -> None:
        self._fitter.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _refit(self) -> None:
        """Fit in a thread. Numpy releases the interpreter's lock, so predictions go on."""
        if self._fit is not None and self._fit[1].done():
            fitting, future = self._fit
            self._fit = None
            self._history.install(fitting, future.result())
        if self._fit is None and (stale := self._history.fitting()) is not None:
            self._fit = stale, self._fitter.submit(stale.fit)
