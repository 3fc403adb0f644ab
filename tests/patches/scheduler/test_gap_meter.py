"""Gaps between tokens, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import gap_meter
from patches.scheduler.gap_meter import GapMeter
from tests.patches.schedulers import StandInBatch, make_request


class Steps:
    """Steps of one meter. now_s: its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(gap_meter, "time", clock)
        self.meter = GapMeter()

    def after(self, seconds: float, *reqs: Any, num_tokens: int = 1) -> None:
        """A step ends after these seconds and gives these requests tokens."""
        self.now_s += seconds
        for req in reqs:
            req.output_ids.extend([1] * num_tokens)
        self.meter.stepped(StandInBatch(reqs), object())  # type: ignore[arg-type]

    def gaps(self, whose: str) -> Any:
        return self.meter.stats()["gaps"][whose]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_a_gap_is_from_token_to_token(steps: Steps) -> None:
    one, other = make_request(), make_request()
    steps.after(5.0, one)  # a first token has no gap before it
    steps.after(0.040, one, other)
    steps.after(0.060, one, other, num_tokens=2)
    steps.after(0.300, one, num_tokens=0)  # a chunk of its prompt, say
    stayed = steps.gaps("stayed")
    assert (stayed["num"], stayed["longest_ms"]) == (5, pytest.approx(60.0))
    assert stayed["mean_ms"] == pytest.approx((40 + 60 + 60) / 5)
    assert steps.gaps("left") == {}


def test_gaps_of_swapped_requests_count_apart(steps: Steps) -> None:
    req = make_request()
    for seconds in (0.0, 0.040, 0.040):
        steps.after(seconds, req)
    req.retraction_count += 1
    steps.after(9.0, req)
    steps.after(0.040, req)
    for whose, number, longest_ms in (("stayed", 3, 40.0), ("left", 1, 9000.0)):
        assert steps.gaps(whose)["num"] == number
        assert steps.gaps(whose)["longest_ms"] == pytest.approx(longest_ms)


def test_old_gaps_are_forgotten(steps: Steps) -> None:
    req = make_request()
    for seconds in (0.0, 2.0, *[1.0] * 130):
        steps.after(seconds, req)
    assert steps.gaps("stayed")["longest_ms"] == pytest.approx(1000.0)
