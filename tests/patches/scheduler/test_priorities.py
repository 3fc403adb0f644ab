"""SGLang's priorities as levels."""

from __future__ import annotations

import math

import pytest

from patches.scheduler.priorities import follow_settings
from tests.patches.schedulers import Server, make_request


def prioritized(**attributes: object) -> Server:
    return Server(**{
        "enable_priority_scheduling": True, "enable_priority_preemption": True, **attributes
    })  # fmt: skip


@pytest.mark.parametrize(("low_first", "expected"), [(False, [5, 0, -1]), (True, [-1, 0, 5])])
def test_a_higher_priority_is_a_smaller_level(low_first: bool, expected: list[int]) -> None:
    server = prioritized(schedule_low_priority_values_first=low_first)
    reqs = [make_request([9]) for _ in range(4)]
    for req, req.priority in zip(reqs, (0, None, 5, -1), strict=True):
        server.arrive(req)
    by_level = sorted(reqs, key=lambda req: req.sage.job.level)
    assert [req.priority for req in by_level] == [*expected, None]


def test_without_the_flag_all_are_alike(server: Server) -> None:
    req = make_request([9])
    req.priority = 7
    server.arrive(req)
    assert req.sage.job.level == 0
    assert server.state.server.level_gap == math.inf


@pytest.mark.parametrize("preempts", [True, False])
def test_sglang_uses_priorities_only_under_its_own_policies(preempts: bool) -> None:
    server = prioritized(enable_priority_preemption=preempts)
    assert server.state.server.level_gap == (10 if preempts else math.inf)
    for policy, is_stock in (("sage", False), ("fcfs", True), ("sage", False)):
        server.state.settings = server.state.settings.changed({"schedule_policy": policy})
        follow_settings(server.scheduler)
        assert server.scheduler.policy.enable_priority_scheduling is is_stock
        assert server.scheduler.enable_priority_preemption is (is_stock and preempts)
