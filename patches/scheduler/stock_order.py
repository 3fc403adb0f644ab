"""SGLang's own order, on a server that was started with one of ours, and back."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context

from patches.engine_types import Scheduler


def stock_order_of(scheduler: Scheduler, name: str) -> Any:
    """What SGLang is to order by (managers/schedule_policy.py, SchedulePolicy.policy): first come,
    first served, which leaves the order as it is, under a policy of ours. Raises ValueError if it
    cannot order by it here."""
    return scheduler.policy._validate_and_adjust_policy(name, scheduler.tree_cache)


def go_by_stock_order(scheduler: Scheduler, name: str, stock_order: Any) -> None:
    """From now on SGLang orders by stock_order. It takes its queue to be by arrival, and in places
    reads the policy's name off its configuration."""
    scheduler.policy.policy = stock_order
    scheduler.schedule_policy = name
    scheduler.waiting_queue.sort(key=lambda req: req.sage.job.arrival)
    get_context().override(source="sage-sched", schedule_policy=name)
