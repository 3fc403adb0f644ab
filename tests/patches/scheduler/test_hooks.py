"""Hooks of a scheduler process, one by one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from patches.scheduler.hooks import scheduler_hooks
from sage_sched.config import SageConfig
from tests.patches.scheduler.test_state import fail


def test_nobody_looks_at_the_queue_without_a_limit_on_it() -> None:
    hooks = {hook.target.rpartition(".")[2]: hook for hook in scheduler_hooks(SageConfig())}
    unlimited: Any = SimpleNamespace(max_queued_requests=None)  # and without a queue
    limited = hooks["_abort_on_queued_limit"].hook
    assert limited(lambda scheduler, req: (scheduler, req), unlimited, 7) == (unlimited, 7)


def test_a_scheduler_goes_on_though_what_it_counts_cannot_be_told() -> None:
    hooks = {hook.target.rpartition(".")[2]: hook for hook in scheduler_hooks(SageConfig())}
    result = SimpleNamespace(internal_state={})
    scheduler: Any = SimpleNamespace(sage=SimpleNamespace(stats=partial(fail, None)))
    hooks["get_internal_state"].hook(result, scheduler, object())
    assert "a bug" in result.internal_state["sage"]["error"]
    # What the HTTP process adds to it has a place.
    assert result.internal_state["sage"]["slo"] == {}
