"""Policies that only comparisons run, by the names that servers and the simulator know them by
(sage_sched.registry.RIVALS)."""

from __future__ import annotations

from bench.policies.fastserve import FastServe
from bench.policies.ltr import Ltr
from bench.policies.ssjf import Ssjf
from bench.policies.trail import Trail
from bench.policies.trail_prompt import TrailPrompt
from bench.policies.uniboost import UniBoost
from bench.policies.variants import (
    ProserveDeadlineOnly,
    ProserveDensityOnly,
    ProserveNoBudget,
    SageMean,
    SageMeasured,
    SageNoRefresh,
    SageNoSessions,
    SageOutput,
    SageOverall,
    SageResourceBound,
    UrgencyArrival,
    UrgencyOrder,
)
from sage_sched.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    "fastserve": FastServe,
    "ltr": Ltr,
    "proserve-deadline-only": ProserveDeadlineOnly,
    "proserve-density-only": ProserveDensityOnly,
    "proserve-no-budget": ProserveNoBudget,
    "sage-mean": SageMean,
    "sage-measured": SageMeasured,
    "sage-norefresh": SageNoRefresh,
    "sage-nosessions": SageNoSessions,
    "sage-output": SageOutput,
    "sage-overall": SageOverall,
    "sage-resource-bound": SageResourceBound,
    "ssjf": Ssjf,
    "trail": Trail,
    "trail-prompt": TrailPrompt,
    "uniboost": UniBoost,
    "urgency-arrival": UrgencyArrival,
    "urgency-order": UrgencyOrder,
}
