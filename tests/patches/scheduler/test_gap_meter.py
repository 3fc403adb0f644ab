"""Gaps between tokens, by a clock of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import gap_meter
from patches.scheduler.gap_meter import GapMeter


class Steps:
    """Steps of one meter. now_s: its clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.meter = GapMeter()

    def after(self, seconds: float, *reqs: Any, num_tokens: int = 1) -> None:
        """A step ends so much later and gives these requests tokens."""
        self.now_s += seconds
        for req in reqs:
            req.output_ids += [1] * num_tokens
        self.meter.stepped(SimpleNamespace(reqs=[*reqs]))  # type: ignore[arg-type]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    clock = SimpleNamespace(monotonic=lambda: made.now_s if made else 100.0)
    made: Steps | None = None
    monkeypatch.setattr(gap_meter, "time", clock)
    made = Steps()
    return made


def request() -> Any:
    return SimpleNamespace(output_ids=[], retraction_count=0)


def test_a_gap_is_from_token_to_token(steps: Steps) -> None:
    one, other = request(), request()
    steps.after(5.0, one)  # nobody waited for a first token's gap
    steps.after(0.040, one, other)
    steps.after(0.060, one, other, num_tokens=2)
    steps.after(0.300, one, num_tokens=0)  # a chunk of its prompt, say
    stayed = steps.meter.stats()["stayed"]
    assert (stayed["num"], stayed["longest_ms"]) == (5, pytest.approx(60.0))
    assert stayed["mean_ms"] == pytest.approx((40 + 60 + 60) / 5)
    assert steps.meter.stats()["left"] == {}


def test_who_left_and_came_back_counts_by_itself(steps: Steps) -> None:
    req = request()
    for seconds in (0.0, 0.040, 0.040):
        steps.after(seconds, req)
    req.retraction_count += 1
    steps.after(9.0, req)
    steps.after(0.040, req)
    found = steps.meter.stats()
    assert (found["stayed"]["num"], found["stayed"]["longest_ms"]) == (3, pytest.approx(40.0))
    assert (found["left"]["num"], found["left"]["longest_ms"]) == (1, pytest.approx(9000.0))


def test_what_is_long_ago_is_forgotten(steps: Steps) -> None:
    req = request()
    steps.after(0.0, req)
    steps.after(2.0, req)
    for _ in range(130):
        steps.after(1.0, req)
    assert steps.meter.stats()["stayed"]["longest_ms"] == pytest.approx(1000.0)
