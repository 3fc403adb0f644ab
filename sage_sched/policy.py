"""What a policy is, and the policies by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from sage_sched.config import PolicyConfig
from sage_sched.job import Job


class Policy(ABC):
    """An order among jobs. Deterministic: every tensor-parallel rank runs its own copy, and all
    must decide alike, so no clock, no randomness, nothing but the job and the configuration.
    """

    @abstractmethod
    def __init__(self, config: PolicyConfig, *, kv_pool_tokens: int) -> None:
        """kv_pool_tokens: how many tokens the server's KV pool holds."""

    @abstractmethod
    def admit(self, job: Job) -> bool:
        """Called once, at the job's arrival; whether the policy can rank it at all.

        A job that it cannot rank keeps its place in the queue, first come, first served.
        """

    @abstractmethod
    def key(self, job: Job) -> float:
        """The job's place: smaller goes first, ties by arrival. Only for jobs it admitted."""


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
