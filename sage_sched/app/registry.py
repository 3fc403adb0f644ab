"""Finds policies by name: ours, rivals for comparisons, and policies of installed packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from sage_sched.best_effort import Qllm
from sage_sched.policies.makespan import Makespan
from sage_sched.policies.sage import Sage
from sage_sched.policy import FcfsFill, Policy
from sage_sched.slo import Proserve
from sage_sched.steps import ServerFacts
from sage_sched.urgency import Urgency

POLICIES: dict[str, type[Policy]] = {
    "sage": Sage,
    "fcfs-fill": FcfsFill,
    "makespan": Makespan,
    "proserve": Proserve,
    "qllm": Qllm,
    "urgency": Urgency,
}
# Other names for a policy of ours, and the parameters that each fixes.
VARIANTS: dict[str, tuple[str, Mapping[str, object]]] = {
    "proserve-expected": ("proserve", {"density": "expected"}),
}
# Policies that only comparisons run. bench is imported only if one of them is used.
RIVALS = {
    "fastserve": "bench.policies.fastserve:FastServe",
    "lpt": "bench.policies.ssjf:Lpt",
    "ltr": "bench.policies.ltr:Ltr",
    "sagesched": "bench.policies.sagesched:SageSched",
    "ssjf": "bench.policies.ssjf:Ssjf",
    "tie": "bench.policies.tie:Tie",
    "tie-log-t": "bench.policies.tie:TieLogT",
    "trail": "bench.policies.trail:Trail",
    "trail-prompt": "bench.policies.trail:TrailPrompt",
    "uniboost": "bench.policies.uniboost:UniBoost",
    "urgency-arrival": "bench.policies.variants:UrgencyArrival",
    "urgency-order": "bench.policies.variants:UrgencyOrder",
}
# A package offers its policies in this group of entry points: a name, and a subclass of Policy.
ENTRY_POINT_GROUP = "sage_sched.policies"
# The names of SGLang's own policies (managers/schedule_policy.py of 0.5.23).
SGLANG_POLICIES = frozenset((
    "dfs-weight", "fcfs", "hrrn", "lof", "lpm", "priority", "random", "routing-key",
    "shortest-prefill-first",
))  # fmt: skip


def policy_names() -> list[str]:
    return sorted(_offers())


def policy_type(name: str) -> type[Policy]:
    """Return the policy of this name. Raises ValueError if no package offers it (the message lists
    the known names), if two packages do, or if it cannot be loaded."""
    offers = _offers().get(name, [])
    if not offers:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(policy_names())}")
    if len(offers) > 1:
        places = " and ".join(place for place, _ in offers)
        raise ValueError(f"there are two policies {name!r}: {places}")
    ((place, load),) = offers
    try:
        policy = load()
    except Exception as error:
        raise ValueError(f"{place} cannot be loaded: {error!r}") from error
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(f"{place} is no subclass of Policy")
    return policy


def section_of(name: str) -> str:
    """Return the NAME of the `[policy.NAME]` section that sets this policy's parameters. A variant
    shares the section of the policy that it varies. Raises ValueError as policy_type does."""
    policy_type(name)
    return VARIANTS.get(name, (name, {}))[0]


def policy_named(name: str, sections: Mapping[str, object], server: ServerFacts) -> Policy:
    """Return a policy with its section's parameters, or with the defaults if there is no section.

    sections: parsed `[policy.NAME]` sections, by NAME. Raises ValueError as policy_type does.
    """
    policy = policy_type(name)
    section, fixed = VARIANTS.get(name, (name, {}))
    parameters: Any = sections.get(section, policy.Parameters())
    return policy(dataclasses.replace(parameters, **fixed), server)


@cache
def _offers() -> dict[str, list[tuple[str, Callable[[], object]]]]:
    """Return the offered policies by name: where each comes from, and a function that loads it."""
    offers: dict[str, list[tuple[str, Callable[[], object]]]] = {}
    for name in (*POLICIES, *VARIANTS):
        section, _ = VARIANTS.get(name, (name, {}))
        offers[name] = [(POLICIES[section].__qualname__, partial(POLICIES.get, section))]
    for name, place in RIVALS.items():
        offers[name] = [(place, partial(_rival, place))]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in SGLANG_POLICIES:  # these names are reserved for SGLang's policies
            offers.setdefault(point.name, []).append((point.value, point.load))
    return offers


def _rival(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
