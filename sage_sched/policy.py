"""What a policy is, and the policies by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from sage_sched.config import PolicyConfig
from sage_sched.job import Job
from sage_sched.step_time import ServerFacts


class Policy(ABC):
    """An order among jobs. Deterministic: every tensor-parallel rank runs its own copy, and all
    must decide alike, so no clock, no randomness, nothing but the job, the tokens that the server
    has worked off, and the configuration.

    moves: whether the key of a waiting job changes with served_tokens.
    clairvoyant: whether it needs true lengths. No server has them, so none runs such a policy.
    """

    moves: ClassVar[bool] = False
    clairvoyant: ClassVar[bool] = False

    def __init__(self, config: PolicyConfig, server: ServerFacts) -> None:
        self.config = config
        self.server = server

    @abstractmethod
    def admit(self, job: Job) -> bool:
        """Called once, at the job's arrival; whether the policy can rank it at all.

        A job that it cannot rank keeps its place in the queue, first come, first served.
        """

    @abstractmethod
    def key(self, job: Job, served_tokens: int) -> float:
        """The job's place: smaller goes first, ties by arrival. Only for jobs it admitted.

        served_tokens: prefilled and decoded by the server so far.
        """

    def yields(self, running: Job, waiting: Job, served_tokens: int, move_s: float) -> bool:
        """Whether a running job should make room for a waiting one of a smaller key, both admitted.
        Never, for a policy that does not preempt.

        move_s: seconds of the server that the running one's way out and back takes. Where it would
        not yield for nothing, it must not for more.
        """
        return False


_POLICIES: dict[str, type[Policy]] = {}
_P = TypeVar("_P", bound=type[Policy])


def register(name: str) -> Callable[[_P], _P]:
    """Class decorator: makes the policy selectable by this name."""

    def add(policy: _P) -> _P:
        if name in _POLICIES:
            raise ValueError(f"policy {name!r} is registered twice")
        _POLICIES[name] = policy
        return policy

    return add


def policy_names() -> list[str]:
    """The names of all registered policies, sorted."""
    import sage_sched.policies  # noqa: F401  (registers them)

    return sorted(_POLICIES)


def policy_named(name: str) -> type[Policy]:
    """The policy of this name. Raises ValueError, which lists the known ones."""
    known = policy_names()
    if name not in known:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(known)}")
    return _POLICIES[name]
