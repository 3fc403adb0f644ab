"""Describes one row of a comparison: a policy and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from bench.policies.rival import Rival
from sage_sched.app.config import SageConfig
from sage_sched.fields import ConfigError, parse_section


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table.

    policy: the name of a policy, with settings as bench.policies.rival.Rival writes them. label:
        the heading of the row; by default the policy.
    settings: sections of our policies' configuration that differ from the defaults.
    engine: fields of the engine that differ from the load's.
    preempt: whether running requests may be preempted.
    predictor: the predictor of lengths. wrong_by: a factor on all predicted lengths. noise: whether
        a uniform distribution is mixed in.
    said_by: the source of urgency levels, if a workload has several. In a workload of agents,
        "client" adds hints about when a session's next step comes and which is its last.
    dispatch: the router before the engines, if a load has several.
    """

    policy: str
    label: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    preempt: bool = True
    predictor: Literal["semantic", "input length", "none", "truth"] = "semantic"
    wrong_by: float = 1.0
    noise: bool = False
    said_by: str = "expert"
    dispatch: str = "total_requests"

    @property
    def name(self) -> str:
        """The label of its row."""
        return self.label or self.policy

    @property
    def config(self) -> SageConfig:
        """Our policies' settings. Raises ConfigError."""
        return SageConfig.parse(self.settings)

    @classmethod
    def parse(cls, found: Any, where: str) -> Self:
        """Parse a policy's name, or a table. Raises ConfigError."""
        found = {"policy": found} if isinstance(found, str) else found
        arm: Self = parse_section(cls, where, found)
        try:
            Rival.parse(arm.policy)
            _ = arm.config
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        return arm
