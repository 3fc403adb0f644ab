"""SLO attainment and gaps between tokens, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.carrier import encode_asked
from patches.scheduler import gap_meter, slo_meter
from sage_sched.job import Hints
from tests.patches.schedulers import Server, make_request

HINTS = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="chat")


class Steps(Server):
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        for module in (gap_meter, slo_meter):
            monkeypatch.setattr(module, "time", clock)
        super().__init__()

    def after(self, seconds: float, *reqs: Any, num_tokens: int = 1) -> None:
        """A step ends after these seconds and gives these requests tokens."""
        self.now_s += seconds
        self.step(*reqs, tokens=num_tokens)

    def gaps(self) -> tuple[int, float, float, dict[str, float]]:
        """Gaps of requests that stayed: number, mean, longest; and gaps of those that left."""
        found = self.stats()["gaps"]
        stayed = found["stayed"]
        return stayed["num"], stayed["mean_ms"], stayed["longest_ms"], found["left"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_a_gap_is_from_token_to_token(steps: Steps) -> None:
    one, other = steps.arrive(make_request(), make_request())
    steps.after(5.0, one)  # a first token has no gap before it
    steps.after(0.040, one, other)
    steps.after(0.060, one, other, num_tokens=2)
    steps.after(0.300, one, num_tokens=0)  # a chunk of its prompt, say
    assert steps.gaps() == (5, pytest.approx((40 + 60 + 60) / 5), pytest.approx(60.0), {})


def test_gaps_of_swapped_requests_count_apart(steps: Steps) -> None:
    (req,) = steps.arrive(make_request())
    for seconds in (0.0, 0.040, 0.040):
        steps.after(seconds, req)
    req.retraction_count += 1
    steps.after(9.0, req)
    steps.after(0.040, req)
    *stayed, left = steps.gaps()
    assert stayed == [3, pytest.approx(40.0), pytest.approx(40.0)]
    assert (left["num"], left["longest_ms"]) == (1, pytest.approx(9000.0))


def test_old_gaps_are_forgotten(steps: Steps) -> None:
    (req,) = steps.arrive(make_request())
    for seconds in (0.0, 2.0, *[1.0] * 70):
        steps.after(seconds, req)
    assert steps.gaps()[2] == pytest.approx(2000.0)  # those of the span before count
    for _ in range(60):
        steps.after(1.0, req)
    assert steps.gaps()[2] == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("ttft_s", "gap_s", "attained"),
    [
        (0.5, 0.05, [1.0, 1.0, 1.0, 1.0]),
        (1.15, 0.05, [0.0, 0.0, 1.0, 0.0]),
        (0.5, 0.5, [0.0, 1.0, 0.0, 2 / 3]),
        (0.5, 0.34, [0.0, 1.0, 0.0, 1.0]),  # the third token is due after 1.2 s
    ],
)
def test_tokens_count_when_they_come_out_of_their_steps(
    steps: Steps, ttft_s: float, gap_s: float, attained: list[float]
) -> None:
    req, aborted, other = steps.arrive(
        make_request([9], hints=HINTS, carried=encode_asked("", 99.8, 99.9)),
        make_request([9], hints=HINTS), make_request([9])
    )  # fmt: skip
    for seconds in (ttft_s - 0.2, gap_s, gap_s):
        steps.after(seconds, req, other)
    steps.after(9.0, aborted)
    steps.state.end(aborted, was_aborted=True)
    req.finished_reason = "stop"
    for _ in range(2):  # under overlap it is in one more step
        steps.after(0.0, req, other, num_tokens=0)
    found: Any = steps.stats()["slo"]
    by_metric = found["slo_attainment_by_metric"].values()
    assert [found["slo_attainment"], *by_metric, found["tdg_ratio"]] == pytest.approx(attained)
    assert found["slo_attainment_by_class"] == {"chat": attained[0]}
