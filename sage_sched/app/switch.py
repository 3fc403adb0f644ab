"""Defines the settings that may change while a server runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sage_sched.app.config import SageConfig, require_predicts_waits
from sage_sched.app.registry import SGLANG_POLICIES, policy_names, policy_type, section_of
from sage_sched.fields import ConfigError, require_known
from sage_sched.limits import Limits
from sage_sched.policy import Policy

# SGLang's own policies that a server can switch to. Its scheduler does not know "priority", and
# "random" draws on each rank from a state that may already differ.
STOCK_POLICIES = SGLANG_POLICIES - {"priority", "random"}
_NAME = "schedule_policy"
_SECTIONS = ("policy", "preemption", "decode", "overload")
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
_FIXED = {
    **dict.fromkeys(
        ("store", "predictor", "hints", "slo", "http"),
        "the processes that accept requests read it only when they start",
    ),
    "probe": "it is built into the model at the start, before CUDA graphs are captured",
    "step_time": "step times are learned while the server runs, unless given at its start",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a server uses.

    schedule_policy: the name of one of our policies, or one of STOCK_POLICIES.
    """

    schedule_policy: str
    config: SageConfig

    def __post_init__(self) -> None:
        """Raises ConfigError if policy and configuration do not fit together."""
        if not self.is_stock:
            policy = policy_type(self.schedule_policy)
            require_predicts_waits(self.config.overload, policy, self.schedule_policy)

    @property
    def is_stock(self) -> bool:
        """Whether SGLang orders and admits by itself."""
        return self.schedule_policy in STOCK_POLICIES

    def keeps_policy_of(self, before: Settings) -> bool:
        """Whether the policy that was made for other settings fits these too."""
        if self.is_stock or self.schedule_policy != before.schedule_policy:
            return self.schedule_policy == before.schedule_policy
        return self._parameters() == before._parameters()

    def _parameters(self) -> object:
        """Return the parameters of a policy of ours."""
        name = self.schedule_policy
        given = self.config.policy.get(section_of(name))
        return policy_type(name).Parameters() if given is None else given

    def limits(self, policy: Policy) -> Limits:
        """Return the limits of these settings; none if SGLang orders and admits by itself."""
        return Limits() if self.is_stock else self.config.limits(policy)

    def limits_after(
        self, before: Settings, present: Limits, policy: Policy, *, is_new_policy: bool
    ) -> Limits:
        """Return the limits of these settings. Parts of the present limits that the change does not
        concern stay, with all that they have learned.

        before: the settings of the present limits.
        is_new_policy: whether the policy has changed. Overload ranks requests by its keys.
        """
        limits = self.limits(policy)
        if self.is_stock or before.is_stock:
            return dataclasses.replace(limits, batches=present.batches)
        is_like = self.config.overload == before.config.overload and not is_new_policy
        keeps_sessions = type(limits.sessions) is type(present.sessions)
        return Limits(
            limits.bounds_after(present),
            present.fair_shares,
            present.adapters,
            present.overload if is_like else limits.overload,
            present.sessions if keeps_sessions else limits.sessions,
            present.batches,
        )

    def changed(self, changes: object) -> Self:
        """Return a copy with some settings changed.

        changes: a mapping as in a configuration file. It may hold the sections that may change, and
            schedule_policy. Raises ConfigError, which says why a value is refused.
        """
        if not isinstance(changes, Mapping):
            raise ConfigError(f"the change is {changes!r:.80}, allowed: names with values")
        for name in changes:
            if isinstance(name, str) and name in _FIXED:
                raise ConfigError(f"{name} cannot change while the server runs: {_FIXED[name]}")
        require_known(changes, dict.fromkeys((_NAME, *_SECTIONS)), "section")
        policy = _policy(changes.get(_NAME, self.schedule_policy))
        sections = {name: changes[name] for name in _SECTIONS if name in changes}
        merged = _merged(self.config.sections(), sections)
        return dataclasses.replace(self, schedule_policy=policy, config=SageConfig.parse(merged))

    @classmethod
    def of(cls, shown: object) -> Self:
        """Return the settings from a mapping that shown() returned. Fixed settings have their
        defaults. Raises ConfigError."""
        return cls("fcfs", SageConfig()).changed(shown)

    def shown(self) -> dict[str, Any]:
        """Return the changeable settings, as changed() takes them. They include the section of the
        present policy, and the sections that were given."""
        sections = self.config.sections()
        if not self.is_stock:
            name = section_of(self.schedule_policy)
            defaults = dataclasses.asdict(policy_type(name).Parameters())
            sections["policy"] = {name: defaults} | sections["policy"]
        shown = {name: _as_given(sections[name]) for name in _SECTIONS}
        return {_NAME: self.schedule_policy, **shown}


def _policy(name: object) -> str:
    known = [*policy_names(), *sorted(STOCK_POLICIES)]
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{_NAME} is {name!r:.80}, allowed: {', '.join(known)}")
    if name not in STOCK_POLICIES:
        try:
            policy_type(name)
        except ValueError as error:
            raise ConfigError(f"{_NAME} {name}: {error}") from error
    return name


def _merged(present: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(present)
    for name, value in changes.items():
        known = merged.get(name)
        if isinstance(value, Mapping):
            merged[name] = _merged(known if isinstance(known, Mapping) else {}, value)
        else:
            merged[name] = _INFINITIES.get(value, value) if isinstance(value, str) else value
    return merged


def _as_given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as a configuration file gives them. Infinities become strings, because JSON
    has no infinity."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown[name] = _as_given(value)
        elif isinstance(value, float) and math.isinf(value):
            shown[name] = "inf" if value > 0 else "-inf"
        elif isinstance(value, bool | int | float | str):
            shown[name] = value
    return shown
