"""SLO attainment of requests, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import slo_meter
from sage_sched.job import Hints
from tests.patches.schedulers import Server, make_request

HINTS = Hints(ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="chat")


@pytest.mark.parametrize(
    ("ttft_s", "gap_s", "attained"),
    [(0.5, 0.05, (1.0, 1.0, 1.0)), (2.0, 0.05, (0.0, 0.0, 1.0)), (0.5, 0.5, (0.0, 1.0, 0.0))],
)
def test_tokens_count_when_they_come_out_of_their_steps(
    monkeypatch: pytest.MonkeyPatch, ttft_s: float, gap_s: float, attained: tuple[float, ...]
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(slo_meter, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    server = Server()
    req, aborted, other = server.arrive(
        make_request([9], hints=HINTS), make_request([9], hints=HINTS), make_request([9])
    )
    for seconds in (ttft_s, gap_s, gap_s):
        now_s[0] += seconds
        server.step(req, other)
    req.finished_reason = "stop"
    for _ in range(2):  # under overlap it is in one more step
        server.step(req, other, tokens=0)
    server.state.end(aborted, was_aborted=True)
    found: Any = server.stats()["slo"]
    by_metric = found["slo_attainment_by_metric"]
    assert (found["slo_attainment"], by_metric["ttft"], by_metric["tpot"]) == attained
    assert found["slo_attainment_by_class"].keys() == {"chat"}
