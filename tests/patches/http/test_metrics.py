from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from patches.http.metrics import HttpMetrics
from predictor_store.predict.quality import LEAST_TO_TELL
from predictor_store.service.client import Prediction
from tests.patches.http.conftest import COUNTED, stats

LABELS = {"model_name": "of test_metrics"}
# All but the first are missing until there are enough answers, and NaN if there are too few later.
RATIOS = ("prediction_scored_answers", "prediction_coverage_ratio", "prediction_crps_gain_ratio")


def reported() -> dict[str, float]:
    """Return our samples by their names and labels."""
    return {
        " ".join([sample.name.removeprefix("sage:"), *labels.values()]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if (labels := dict(sample.labels)).pop("model_name", "") == LABELS["model_name"]
        and not sample.name.endswith(("_created", "_bucket"))
    }


def test_the_workers_counts_are_reported_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=count(5.0, 0.25).__next__)
    monkeypatch.setattr("patches.http.metrics.time", clock)
    due: list[tuple[Any, ...]] = []
    client: Any = SimpleNamespace(stats=lambda: stats(0))

    async def prediction() -> Prediction:
        return Prediction(7, None)

    async def requests() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *call: due.append(call))
        metrics = HttpMetrics(client, LABELS)
        for _ in range(2):
            metrics.start()
            assert await metrics.timed(prediction()) == Prediction(7, None)

    asyncio.run(requests())
    for num_answers, num_predicted, *ratios in (
        (0, 0, 0), (2, 2, 2), (LEAST_TO_TELL - 1, 49, 49), (LEAST_TO_TELL, 50, 50, 0.25, -1.0),
        (3, 50, 3, float("nan"), float("nan")),  # the worker is another now
    ):  # fmt: skip
        client.stats = lambda num=num_answers: stats(num)
        ((interval_s, report, *args),) = due
        assert interval_s == 2.0
        due.clear()
        report(*args)
        assert reported() == pytest.approx(
            {
                **{f"predictions_total {name}": n * num_predicted
                   for n, name in enumerate(COUNTED, 1)},
                "prediction_misses_total": 7, "predictor_up": 1, "predictor_records": 8,
                "predictor_unwritten_records": 9, "predictor_widened": float(num_answers > 0),
                "prediction_latency_seconds_count": 2, "prediction_latency_seconds_sum": 0.5,
                **dict(zip(RATIOS, ratios, strict=False)),
            }, nan_ok=True,
        )  # fmt: skip
    client.stats = dict  # an error ends the reports
    due[0][1](*due[0][2:])
    assert len(due) == 1
