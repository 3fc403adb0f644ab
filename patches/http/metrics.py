"""Reports an HTTP process's predictions on /metrics, every two seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from patches.series import Series
from predictor_store.predict.quality import LEAST_TO_TELL
from predictor_store.service.client import Prediction, PredictorClient
from sage_sched.distribution import SOURCES

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0
# Each ratio over the last answers, and the worker's name for it.
_RATIOS = {"prediction_coverage_ratio": "within_80", "prediction_crps_gain_ratio": "crps_gain"}


class HttpMetrics:
    """Reports the series of one HTTP process, on its event loop."""

    def __init__(self, client: PredictorClient, labels: Mapping[str, Any] | None) -> None:
        """labels: SGLang's own labels of this process; None without --enable-metrics."""
        self._client = client
        self._series = None if labels is None else Series(labels)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def timed(self, prediction: Awaitable[Prediction]) -> Prediction:
        """Await a prediction, and report how long it took."""
        started_s = time.perf_counter()
        done = await prediction
        if self._series is not None:
            self._series.observe("prediction_latency_seconds", time.perf_counter() - started_s)
        return done

    def start(self) -> None:
        """Start reporting on this event loop. Called for each request; the server itself sends the
        first."""
        loop = asyncio.get_running_loop()
        if self._series is not None and self._loop is not loop:
            self._loop = loop
            self._look(self._series, loop)

    def _look(self, series: Series, loop: asyncio.AbstractEventLoop) -> None:
        try:
            _say(series, self._client.stats())
        except Exception:
            logger.exception("series of sage-sched on /metrics are no longer brought up to date")
        else:
            loop.call_later(_INTERVAL_S, self._look, series, loop)


def _say(series: Series, stats: dict[str, Any]) -> None:
    for source in SOURCES:
        if source != "truth":
            series.count("predictions_total", stats[f"num_predicted_{source}"], source=source)
    misses = stats["num_deadline_misses"] + stats["num_unsent"]
    series.count("prediction_misses_total", misses)
    series.set("predictor_up", stats["worker_alive"])
    series.set("predictor_records", stats["num_records"])
    series.set("predictor_unwritten_records", stats["num_unwritten"])
    quality = stats["quality"]
    series.set("predictor_widened", float(quality.get("widened", False)))
    num_scored = quality.get("num_answers", 0)
    series.set("prediction_scored_answers", num_scored)
    for name, measure in _RATIOS.items():
        if num_scored >= LEAST_TO_TELL and measure in quality:
            series.set(name, quality[measure])
        else:  # after a restart there are too few answers again
            series.unset(name)
