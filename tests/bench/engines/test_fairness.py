from __future__ import annotations

import numpy as np
import pytest

from bench.engines.run_metrics import fairness_metrics, largest_overtaking

ARRIVAL_S = np.array([0.0, 1.0, 2.0])
ALONE_S = np.array([10.0, 5.0, 20.0])


def test_who_comes_later_and_ends_earlier_overtakes() -> None:
    # The first is overtaken by both: 25 s of work beside its own 10.
    assert largest_overtaking(ARRIVAL_S, np.array([40.0, 6.0, 30.0]), ALONE_S) == 2.5
    # The last ends first; the second has found 10 s of work beside its own 5.
    assert largest_overtaking(ARRIVAL_S, np.array([20.0, 50.0, 30.0]), ALONE_S) == 20 / 15


def test_first_come_first_served_is_overtaken_by_nobody() -> None:
    assert largest_overtaking(ARRIVAL_S, np.array([10.0, 15.0, 35.0]), ALONE_S) == 0.0


def test_slowdowns_are_told_by_length_and_by_how_even_they_are() -> None:
    last_s = ARRIVAL_S + ALONE_S * np.array([1.0, 2.0, 3.0])
    metrics = fairness_metrics(
        ARRIVAL_S, last_s, ALONE_S, np.array([300, 200, 100]), np.array([1, 2, 3])
    )
    assert (metrics["slowdown_short_answers"], metrics["slowdown_long_answers"]) == (1.0, 3.0)
    assert (metrics["slowdown_short_prompts"], metrics["slowdown_long_prompts"]) == (3.0, 1.0)
    assert metrics["jain_percent"] == pytest.approx(100 * 4 / (14 / 3))
