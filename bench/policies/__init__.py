"""Lists the policies that only comparisons run, by their names on servers and in the simulator
(sage_sched.app.registry.RIVALS)."""

from __future__ import annotations

from bench.policies import variants
from bench.policies.fastserve import FastServe
from bench.policies.ltr import Ltr
from bench.policies.sagesched import SageSched
from bench.policies.ssjf import Lpt, Ssjf
from bench.policies.tie import Tie, TieLogT
from bench.policies.trail import Trail, TrailPrompt
from bench.policies.uniboost import UniBoost
from sage_sched.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    "fastserve": FastServe,
    "lpt": Lpt,
    "ltr": Ltr,
    "sagesched": SageSched,
    "ssjf": Ssjf,
    "tie": Tie,
    "tie-log-t": TieLogT,
    "trail": Trail,
    "trail-prompt": TrailPrompt,
    "uniboost": UniBoost,
    "urgency-arrival": variants.UrgencyArrival,
    "urgency-order": variants.UrgencyOrder,
}
