"""The policies by name: ours, those of comparisons, and those of installed packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from sage_sched.best_effort import Qllm
from sage_sched.parts_finder import find_parts
from sage_sched.policies.fcfs_fill import FcfsFill
from sage_sched.policies.sage import Sage
from sage_sched.policy import Policy
from sage_sched.slo import Proserve
from sage_sched.steps import ServerFacts
from sage_sched.urgency import Urgency

POLICIES: dict[str, type[Policy]] = {
    "sage": Sage,
    "fcfs-fill": FcfsFill,
    "proserve": Proserve,
    "qllm": Qllm,
    "urgency": Urgency,
}
# Policies that only comparisons run. bench.policies has them under these names, and is imported
# only when one of them is asked for.
RIVALS = (
    "fastserve", "ltr", "proserve-deadline-only", "proserve-density-only", "proserve-no-budget",
    "sage-mean", "sage-measured", "sage-norefresh", "sage-nosessions", "sage-output",
    "sage-overall", "sage-resource-bound", "ssjf", "trail", "trail-prompt", "uniboost",
    "urgency-arrival", "urgency-order",
)  # fmt: skip
# A package offers its policies in this group of entry points: a name, and a subclass of Policy.
ENTRY_POINT_GROUP = "sage_sched.policies"
# The names of SGLang's own policies (managers/schedule_policy.py of 0.5.23).
SGLANG_POLICIES = frozenset(
    {
        "dfs-weight", "fcfs", "hrrn", "lof", "lpm", "priority", "random", "routing-key",
        "shortest-prefill-first",
    }
)  # fmt: skip


def policy_names() -> list[str]:
    """The names of all policies, sorted: ours, those of comparisons and of installed packages."""
    return sorted(_sources())


def policy_type(name: str) -> type[Policy]:
    """The policy of this name. Raises ValueError, which lists the known ones, or says what is wrong
    with an installed package's."""
    sources = _sources()
    if name not in sources:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(sorted(sources))}")
    return sources[name].load()


def section_of(name: str) -> str:
    """Which `[policy.NAME]` sets the parameters of the policy of this name: a variant has the one
    of the policy that it varies. Raises ValueError as policy_type does."""
    policy_type(name)
    return _sources()[name].section


def policy_named(name: str, sections: Mapping[str, object], server: ServerFacts) -> Policy:
    """A policy with its section's parameters, or else the defaults.

    sections: parsed `[policy.NAME]` sections, by NAME. Raises ValueError as policy_type does.
    """
    policy = policy_type(name)
    parameters: Any = sections.get(section_of(name), policy.Parameters())
    return policy(dataclasses.replace(parameters, **policy.variants.get(name, {})), server)


class _Source(NamedTuple):
    """Where a policy can be had. section: of the configuration. offers: of each that offers one of
    this name, where it comes from, and what loads it."""

    section: str
    offers: tuple[tuple[str, Callable[[], object]], ...]

    def load(self) -> type[Policy]:
        """Raises ValueError if the policy cannot be had, or if two are offered."""
        if len(self.offers) > 1:
            places = " and ".join(place for place, _ in self.offers)
            raise ValueError(f"there are two policies {self.section!r}: {places}")
        ((place, load),) = self.offers
        try:
            policy = load()
        except Exception as error:
            raise ValueError(f"{place} cannot be loaded: {error!r}") from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ValueError(f"{place} is no subclass of Policy")
        return policy


@cache
def _sources() -> dict[str, _Source]:
    sources: dict[str, _Source] = {}
    for section, policy in POLICIES.items():
        source = _Source(section, ((policy.__qualname__, partial(POLICIES.get, section)),))
        sources |= dict.fromkeys((section, *policy.variants), source)
    for name in RIVALS:
        sources[name] = _Source(name, (("bench.policies", partial(_rival, name)),))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in SGLANG_POLICIES:  # they stay SGLang's, whatever is installed
            known = sources.get(point.name, _Source(point.name, ()))
            sources[point.name] = _Source(point.name, (*known.offers, (point.value, point.load)))
    return sources


def _rival(name: str) -> object:
    find_parts(("bench",))
    return import_module("bench.policies").POLICIES[name]
