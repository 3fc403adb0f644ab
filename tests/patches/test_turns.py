from __future__ import annotations

import pytest

from bench.queue_pass import FullServer
from sage_sched.policies.sage import SagePolicy


def test_a_policy_that_fails_at_the_plan_costs_the_plan_and_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = FullServer(num_waiting=5, num_newcomers=1)
    server.step()
    expected = server.take_turns()

    def fail(self: SagePolicy, *args: object) -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SagePolicy, "yields", fail)
    for request in server.running:
        request.output_ids += [0] * 1500  # longer than foreseen, so the worst of all
    server.ranker.num_arrivals += 1
    assert server.take_turns() == expected
    assert server.ranker.stats()["num_policy_errors"] == 1
