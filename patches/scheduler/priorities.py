"""Maps SGLang's priorities (--enable-priority-scheduling) to our levels (Job.level)."""

from __future__ import annotations

import math

from patches.engine_types import Req, Scheduler
from sage_sched.job import MOST_LEVEL


def level_of(req: Req, scheduler: Scheduler) -> int:
    """Return a request's level. Smaller levels go first; requests without a priority go last."""
    if not scheduler.enable_priority_scheduling:
        return 0
    if req.priority is None:
        return MOST_LEVEL
    level = req.priority if scheduler.schedule_low_priority_values_first else -req.priority
    return max(-MOST_LEVEL, min(level, MOST_LEVEL - 1))


def level_gap(scheduler: Scheduler) -> float:
    """Return ServerFacts.level_gap, for a scheduler that has made no pass yet."""
    if not scheduler.enable_priority_preemption:
        return math.inf
    return float(scheduler.priority_scheduling_preemption_threshold)


def follow_settings(scheduler: Scheduler) -> None:
    """Turn SGLang's own priorities on if its own policy is chosen, and off otherwise."""
    if scheduler.enable_priority_scheduling:
        sage = scheduler.sage
        is_stock = sage.is_stock
        scheduler.policy.enable_priority_scheduling = is_stock
        scheduler.enable_priority_preemption = is_stock and sage.server.level_gap < math.inf
