from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from patches.http.metrics import _say
from patches.series import Series
from predictor_store.predict.quality import LEAST_TO_TELL
from sage_sched.distribution import SOURCES

LABELS = {"model_name": "of test_http_metrics"}
RATIOS = ("sage:prediction_coverage_ratio", "sage:prediction_crps_gain_ratio")


def stats(num_answers: int) -> dict[str, Any]:
    quality = {"num_answers": num_answers, "within_80": 0.0, "crps_gain": -1.0}
    counted = {f"num_predicted_{source}": num_answers for source in (*SOURCES, "none")}
    return counted | {
        "num_deadline_misses": 3, "num_unsent": 4, "worker_alive": True, "num_records": 0,
        "num_unwritten": 0, "quality": quality if num_answers else {},
    }  # fmt: skip


def test_a_ratio_of_few_answers_is_not_said() -> None:
    series = Series(LABELS)
    of = lambda name: REGISTRY.get_sample_value(name, LABELS)  # noqa: E731
    for few in (0, 2, LEAST_TO_TELL - 1):
        _say(series, stats(few))
        assert [of(name) for name in RATIOS] == [None, None]
        assert of("sage:prediction_scored_answers") == few
        assert of("sage:prediction_misses_total") == 7
        by_source = [{**LABELS, "source": source} for source in ("history", "none")]
        found = [REGISTRY.get_sample_value("sage:predictions_total", each) for each in by_source]
        assert found == [few, few]
    _say(series, stats(LEAST_TO_TELL))
    assert [of(name) for name in RATIOS] == [0.0, -1.0]
    # The worker is another now.
    _say(series, stats(2))
    assert [of(name) for name in RATIOS] == pytest.approx([float("nan")] * 2, nan_ok=True)
