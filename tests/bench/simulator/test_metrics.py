"""Metrics of a run: waits, slowdowns and overtaking."""

from __future__ import annotations

import numpy as np
import pytest

from bench.simulator.run_metrics import fairness_metrics, largest_overtaking, run_metrics


def test_waits_and_the_drain() -> None:
    rows = [  # sent, first and last token, tokens, alone
        (0.0, 1.0, 4.0, 30, 2.0),  # waited for 2
        (2.0, 3.0, 17.0, 15, 9.0),  # half of it over at 10, waited for 6
        (10.0, 12.0, 16.0, 20, 4.0),  # the last to come, all of it in the drain, waited for 2
    ]
    assert run_metrics(*map(np.array, zip(*rows, strict=True))) == {
        "mean_waited_s": pytest.approx(10 / 3),
        "median_waited_s": pytest.approx(2.0),
        "p99_waited_s": pytest.approx(6.0, rel=0.02),
        "arrivals_s": 10.0,
        "arrivals_per_ttlt": pytest.approx(10.0 / ((4 + 15 + 6) / 3)),
        "arriving_throughput": pytest.approx((30 + 1 + 14 / 2) / 10),
        "drain_s": pytest.approx(7.0),
        "drain_share": pytest.approx(2 / 3),
    }


ARRIVAL_S = np.array([0.0, 1.0, 2.0])
ALONE_S = np.array([10.0, 5.0, 20.0])


@pytest.mark.parametrize(
    ("last_s", "largest"),
    [
        ([40.0, 6.0, 30.0], 2.5),  # both overtake the first: 25 s of work over its own 10
        ([20.0, 50.0, 30.0], 20 / 15),  # the second found 10 s of work and has 5 of its own
        ([10.0, 15.0, 35.0], 0.0),  # first come, first served
    ],
)
def test_a_later_request_that_ends_earlier_overtakes(last_s: list[float], largest: float) -> None:
    assert largest_overtaking(ARRIVAL_S, np.array(last_s), ALONE_S) == largest


def test_slowdowns_by_length_and_jains_index() -> None:
    last_s = ARRIVAL_S + ALONE_S * np.array([1.0, 2.0, 3.0])
    prompts, answers = np.array([300, 200, 100]), np.array([1, 2, 3])
    found = fairness_metrics(ARRIVAL_S, last_s, ALONE_S, prompts, answers)
    assert (found["slowdown_short_answers"], found["slowdown_long_answers"]) == (1.0, 3.0)
    assert (found["slowdown_short_prompts"], found["slowdown_long_prompts"]) == (3.0, 1.0)
    assert found["jain_percent"] == pytest.approx(100 * 4 / (14 / 3))
