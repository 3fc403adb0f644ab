"""SGLang's priorities as levels."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler.priorities import follow_settings, level_gap, level_of
from patches.scheduler.state import SchedulerState
from sage_sched.app.config import SageConfig
from tests.checks.full_server import stand_in_scheduler


def with_priorities(**about: Any) -> Any:
    found = stand_in_scheduler(lambda: 10_000)
    vars(found).update(
        enable_priority_scheduling=True,
        enable_priority_preemption=True,
        schedule_low_priority_values_first=False,
        priority_scheduling_preemption_threshold=10,
        policy=SimpleNamespace(enable_priority_scheduling=True),
        **about,
    )
    found.sage = SchedulerState(found, SageConfig.parse({"preemption": {"enabled": False}}))
    return found


@pytest.mark.parametrize(("low_first", "expected"), [(False, [5, 0, -1]), (True, [-1, 0, 5])])
def test_a_higher_priority_is_a_smaller_level_and_none_the_largest(
    low_first: bool, expected: list[int]
) -> None:
    scheduler: Any = SimpleNamespace(
        enable_priority_scheduling=True, schedule_low_priority_values_first=low_first
    )
    requests: list[Any] = [SimpleNamespace(priority=priority) for priority in (0, None, 5, -1)]
    by_level = sorted(requests, key=lambda req: level_of(req, scheduler))
    assert [req.priority for req in by_level] == [*expected, None]


def test_without_the_flag_all_are_alike_and_nobody_yields_for_a_priority() -> None:
    scheduler = stand_in_scheduler(lambda: 10_000)
    request: Any = SimpleNamespace(priority=7)
    assert level_of(request, scheduler) == 0
    assert level_gap(scheduler) == math.inf


def test_sglang_goes_by_priorities_only_while_its_own_policy_is_chosen() -> None:
    scheduler = with_priorities()
    assert scheduler.sage.server.level_gap == 10
    for policy, is_stock in (("sage", False), ("fcfs", True), ("sage", False)):
        scheduler.sage.settings = scheduler.sage.settings.changed({"schedule_policy": policy})
        follow_settings(scheduler)
        assert scheduler.policy.enable_priority_scheduling is is_stock
        assert scheduler.enable_priority_preemption is is_stock


def test_sglang_does_not_preempt_if_it_was_told_not_to() -> None:
    scheduler = with_priorities()
    scheduler.enable_priority_preemption = False
    scheduler.sage = SchedulerState(scheduler, SageConfig.parse({"preemption": {"enabled": False}}))
    scheduler.sage.settings = scheduler.sage.settings.changed({"schedule_policy": "fcfs"})
    follow_settings(scheduler)
    assert not scheduler.enable_priority_preemption
