"""Simulated and measured runs side by side."""

from __future__ import annotations

import pytest

from tests.checks.validation import Point, misordered, summarize, table


def point(policy: str, seed: int, measured_s: float, simulated_s: float) -> Point:
    return Point(policy, "2x", seed, (measured_s, 3 * measured_s), (simulated_s, 4 * simulated_s))


def test_ratios_are_of_means_over_seeds_and_policies_in_another_order_are_named() -> None:
    points = [
        point("fcfs", 0, 10.0, 11.0), point("fcfs", 1, 30.0, 31.0),
        point("hrrn", 0, 9.0, 9.0), point("hrrn", 1, 29.0, 35.0),
        point("sage", 0, 5.0, 5.0), point("sage", 1, 15.0, 15.0),
    ]  # fmt: skip
    assert summarize(points)["fcfs"]["2x"] == {
        "mean_ratio": pytest.approx(42 / 40), "p99_ratio": pytest.approx(42 / 40 * 4 / 3),
    }  # fmt: skip
    assert ["2x", "fcfs", "20.00", "21.00", "1.05"] in [
        row.split()[:5] for row in table(points).splitlines()
    ]
    assert misordered(points) == ["2x: fcfs / hrrn is 1.05, simulated 0.95"]
