"""What a policy is, and the policies by name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from sage_sched.fairness.tenants import Tenants
from sage_sched.job import Job
from sage_sched.plan import Budget
from sage_sched.steps.time import ServerFacts

if TYPE_CHECKING:
    from sage_sched.view import SchedulerView

# A package offers its policies in this group of entry points: a name, and a subclass of Policy.
ENTRY_POINT_GROUP = "sage_sched.policies"
# The names of SGLang's own (managers/schedule_policy.py of 0.5.23).
SGLANG_POLICIES = frozenset(
    {
        "dfs-weight", "fcfs", "hrrn", "lof", "lpm", "priority", "random", "routing-key",
        "shortest-prefill-first",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters:
    """Of a policy that has nothing to set."""


class Policy(ABC):
    """An order among jobs. Deterministic: every tensor-parallel rank runs its own copy, and all
    must decide alike, so no clock, no randomness, nothing but jobs, views and parameters.

    Parameters: its settings, a frozen dataclass whose fields all have defaults; the section
        `[policy.NAME]` of the configuration file.
    variants: other names for one of ours, and the parameters that each fixes. Such a name has no
        section of its own.
    moves: whether the key of a job changes while the job waits.
    is_clairvoyant: whether it needs true lengths. No server has them, so none runs such a policy.
    uses_clock: whether it reads SchedulerView.now_s or Job.arrival_s, which rank 0 then broadcasts.
    refines_by: what it makes of the scores of a probe that reads hidden states: "posterior"
        (sage_sched.probe.posterior), "trail" (sage_sched.probe.trail_filter), or "" if it takes
        none. A server runs one that takes some with a probe alone.
    refresh_interval_tokens: while the batch is full, who yields is looked at again when a running
        job's age reaches a multiple of it.
    revision: how often its server's step times were found to be others.
    """

    Parameters: ClassVar[type[Any]] = NoParameters
    variants: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    moves: ClassVar[bool] = False
    is_clairvoyant: ClassVar[bool] = False
    uses_clock: ClassVar[bool] = False
    refines_by: str = ""
    refresh_interval_tokens: int = 200
    revision: int = 0

    def __init__(self, parameters: Any, server: ServerFacts) -> None:
        """server: sizes and step times as known at the start, see on_server."""
        self.parameters = parameters
        self.server = server
        self.tenants = Tenants()

    def on_arrival(self, job: Job) -> bool:
        """A job has come; whether the policy can rank it. One that it cannot rank keeps its turn,
        first come, first served."""
        return True

    def on_forecast(self, job: Job) -> None:
        """What a ranked job rests on has changed while it waits or runs: it was revised, more or
        less of its prompt is cached, or the server is known better."""
        self.on_arrival(job)

    def on_forecasts(self, jobs: Sequence[Job]) -> None:
        """What was seen of these ranked jobs' answers has revised how long they are (Job.refined).
        All at once, as it is done after many steps, for many jobs."""
        for job in jobs:
            self.on_forecast(job)

    def on_server(self, server: ServerFacts) -> None:
        """The server's step times are known better now. on_forecast follows for each ranked job,
        before it is compared with others again, so that all are ranked by the same times."""
        self.server = server
        self.revision += 1

    def on_pass(self, view: SchedulerView) -> None:
        """A pass is about to order the jobs. What may be promised (Job.promise), is now."""
        return

    @abstractmethod
    def key(self, job: Job, view: SchedulerView) -> float:
        """The place of a ranked job: smaller goes first, ties by arrival.

        A key of infinity holds a waiting job back, as long as any other job runs or may enter.
        """

    @property
    def preempts(self) -> bool:
        """Whether should_preempt can ever hold."""
        return type(self).should_preempt is not Policy.should_preempt

    def should_preempt(
        self, running: Job, waiting: Job, price_s: float, view: SchedulerView
    ) -> bool:
        """Whether a running job is to make room for a waiting one of a smaller key, both ranked.

        price_s: seconds of the server that the running one's way out and back takes. What does not
        hold at 0 must not hold at more. view: its waiting jobs are in their order here.
        """
        return False

    def budget(self, view: SchedulerView) -> Budget | None:
        """How much this pass may prefill; None leaves it to SGLang."""
        return None


def policy_names() -> list[str]:
    """The names of all policies, sorted: ours, and those of installed packages."""
    return sorted(_sources())


def served_policy_names() -> list[str]:
    """Those that a server can run, as far as is known without loading those of packages."""
    clairvoyant = {
        name
        for name, source in _sources().items()
        if any(isinstance(of, type) and of.is_clairvoyant for of in source.found)
    }
    return [name for name in policy_names() if name not in clairvoyant]


def policy_type(name: str) -> type[Policy]:
    """The policy of this name. Raises ValueError, which lists the known ones, or says what is wrong
    with an installed package's."""
    sources = _sources()
    if name not in sources:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(sorted(sources))}")
    return sources[name].load()


def section_of(name: str) -> str:
    """Which `[policy.NAME]` sets the parameters of the policy of this name: of a variant that of
    the policy which it varies. Raises ValueError as policy_type does."""
    policy_type(name)
    return _sources()[name].section


def policy_named(name: str, sections: Mapping[str, object], server: ServerFacts) -> Policy:
    """A policy with its section's parameters, or else the defaults.

    sections: parsed `[policy.NAME]` sections, by NAME. Raises ValueError as policy_type does.
    """
    policy = policy_type(name)
    parameters: Any = sections.get(section_of(name), policy.Parameters())
    return policy(dataclasses.replace(parameters, **policy.variants.get(name, {})), server)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Where a policy is to be had. section: of the configuration."""

    section: str
    found: tuple[type[Policy] | EntryPoint, ...]

    def load(self) -> type[Policy]:
        """Raises ValueError if it cannot be had, or if there are two."""
        if len(self.found) > 1:
            places = " and ".join(_place(source) for source in self.found)
            raise ValueError(f"there are two policies {self.section!r}: {places}")
        (source,) = self.found
        try:
            policy = source.load() if isinstance(source, EntryPoint) else source
        except Exception as error:
            raise ValueError(f"{_place(source)} cannot be loaded: {error!r}") from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ValueError(f"{_place(source)} is no subclass of Policy")
        return policy


def _place(source: type[Policy] | EntryPoint) -> str:
    return source.value if isinstance(source, EntryPoint) else source.__qualname__


@cache
def _sources() -> dict[str, _Source]:
    from sage_sched.registry import POLICIES

    sources: dict[str, _Source] = {}
    for section, policy in POLICIES.items():
        sources |= dict.fromkeys((section, *policy.variants), _Source(section, (policy,)))
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in SGLANG_POLICIES:  # they stay SGLang's, whatever is installed
            known = sources.get(point.name, _Source(point.name, ()))
            sources[point.name] = _Source(point.name, (*known.found, point))
    return sources
