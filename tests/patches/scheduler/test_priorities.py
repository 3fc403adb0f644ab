from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.patches.schedulers import Server, make_request

LEAST = -(2**63)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [5, 0, -1, LEAST, None]),
        ({"schedule_low_priority_values_first": True}, [LEAST, -1, 0, 5, None]),
        ({"enable_priority_scheduling": False}, [0, None, 5, -1, LEAST]),
    ],
)
def test_a_higher_priority_is_a_smaller_level(
    flags: dict[str, bool], expected: list[int | None]
) -> None:
    server = Server(**{"enable_priority_scheduling": True, **flags})
    reqs = [make_request([9]) for _ in range(5)]
    for req, req.priority in zip(reqs, (0, None, 5, -1, LEAST), strict=True):
        server.arrive(req)
    by_level = sorted(reqs, key=lambda req: req.sage.job.level)
    assert [req.priority for req in by_level] == expected


@pytest.mark.parametrize("preempts", [True, False])
def test_sglang_uses_priorities_only_under_its_own_policies(preempts: bool) -> None:
    server = Server(enable_priority_scheduling=True, enable_priority_preemption=preempts)
    scheduler, state = server.scheduler, server.state
    assert state.server.level_gap == (10 if preempts else math.inf)
    for policy, is_stock in (("sage", False), ("fcfs", True), ("sage", False)):
        state.settings = state.settings.changed({"schedule_policy": policy})
        server.hooks["get_new_batch_prefill"](
            lambda scheduler, batch: SimpleNamespace(running_batch=batch),
            scheduler, scheduler.running_batch,
        )  # fmt: skip
        assert scheduler.policy.enable_priority_scheduling is is_stock
        assert scheduler.enable_priority_preemption is (is_stock and preempts)
