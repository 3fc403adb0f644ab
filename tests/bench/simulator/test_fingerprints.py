"""No decision of a policy, no simulated time and no metric changes unnoticed."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import replace
from functools import partial

import pytest

from bench.simulator.result import Served
from bench.simulator.run import simulate
from bench.simulator.state import Options
from sage_sched.job import Hints
from sage_sched.slo import Deadlines
from tests.bench.simulator.traffic import CONFIG, MANY_SLOTS, burst, mixed
from tests.bench.workloads.fingerprint import fingerprint
from tests.checks.fingerprint import RECORDED, cases, digest

_KNOWN: dict[str, str] = json.loads(RECORDED.read_text())


@pytest.mark.skipif(
    sys.version_info >= (3, 12) or platform.machine() != "x86_64",
    reason="the results are recorded with Python 3.11 on x86: others may round sums otherwise",
)
@pytest.mark.parametrize("name", sorted({*_KNOWN, *cases()}))
def test_results_are_as_recorded(name: str) -> None:
    assert digest(cases()[name]()) == _KNOWN[name], "see tests/checks/fingerprint.py"


def test_metrics_are_as_recorded() -> None:
    """The requests have deadlines or sessions, and fill the engine. Some metrics cover a part."""
    hints = Hints(ttft_slo_ms=900.0, tpot_slo_ms=60.0, weight=2.0, first_token_weight=3.0)
    asked = [
        replace(each, hints=hints if number % 3 else Hints(session=str(number % 7)))
        for number, each in enumerate((*mixed(120, 8.0, 3), *burst()))
    ]
    requests = sorted(asked, key=lambda each: each.arrival_s)
    run = partial(simulate, MANY_SLOTS, config=CONFIG, requests=requests)
    results = [run(policy=policy, options=Options(due=Deadlines(2.0, 0.1)))
               for policy in ("fcfs", "sage")]  # fmt: skip
    views: list[Served] = [
        *results, results[1].only(["20", "250"]), results[1].arrived_within(0.2, 0.8)
    ]  # fmt: skip
    found = [
        (each.metrics(), each.session_metrics(), each.attainment(), each.on_time_share(0.5),
         each.good_share(0.5, 0.05))
        for each in views
    ]  # fmt: skip
    assert [*map(fingerprint, found)] == ["3016ea87", "45b91fe6", "d3e4fcaf", "00f947a8"]
