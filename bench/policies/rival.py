"""A policy's name on the command line, with the settings of SGLang's admission."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any, Self

from sage_sched.app.registry import policy_names

# The type of each setting, its minimum, and its allowed values in words.
_SETTINGS: dict[str, tuple[type, int, str]] = {
    "conservativeness": (float, 0, "a number, 0 or more"),
    "clip": (int, 1, "a whole number of tokens, at least 1"),
}
# SGLang's policies that use or guess lengths.
_ORDERS_BY_LENGTH = ("hrrn", "shortest-prefill-first")
_FORM = "NAME@" + ",".join(f"{name}=..." for name in _SETTINGS)


@dataclass(frozen=True, slots=True)
class Rival:
    """A policy with settings, written `fcfs`, `fcfs@conservativeness=0.3` or
    `fcfs@conservativeness=0.3,clip=1024`.

    policy: a value of --schedule-policy.
    conservativeness: SGLang's --schedule-conservativeness, which scales the share of an answer's
        cap for which memory is reserved (SGLang's default: 1).
    clip_tokens: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION; caps above it reserve no more memory than
        this cap (SGLang's default: 4096).

    Both settings are None if the server keeps its defaults.
    """

    policy: str
    conservativeness: float | None = None
    clip_tokens: int | None = None

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Parse a policy with its settings. Raises ValueError with the allowed values.

        Unknown policies are left to the server, because only the server knows all that it has.
        """
        policy, has_settings, rest = spec.partition("@")
        if not policy:
            raise ValueError(f"{spec!r} names no policy, allowed: NAME or {_FORM}")
        if not has_settings:
            return cls(policy)
        if policy in policy_names():
            raise ValueError(
                f"{spec!r}: {' and '.join(_SETTINGS)} tune SGLang's admission, which {policy} "
                "replaces; use them with SGLang's policies (fcfs@conservativeness=0.3)"
            )
        values: dict[str, Any] = {}
        for part in rest.split(","):
            name, _, text = part.partition("=")
            if name not in _SETTINGS:
                raise ValueError(f"{spec!r} has the setting {name!r}, allowed: {_FORM}")
            if name in values:
                raise ValueError(f"{spec!r} sets {name} twice")
            kind, least, allowed = _SETTINGS[name]
            try:
                values[name] = kind(text)
            except ValueError:
                values[name] = math.nan
            if not least <= values[name] < math.inf:
                raise ValueError(f"{spec!r}: {name} is {text!r}, allowed: {allowed}")
        return cls(policy, values.get("conservativeness"), values.get("clip"))

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of a server's command line."""
        flags = ("--schedule-policy", self.policy)
        if self.conservativeness is None:
            return flags
        return (*flags, "--schedule-conservativeness", str(self.conservativeness))

    @property
    def env(self) -> dict[str, str]:
        """Return the variables of a server's environment."""
        if self.clip_tokens is None:
            return {}
        return {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(self.clip_tokens)}

    @property
    def engine_fields(self) -> dict[str, float]:
        """Return the fields of bench.simulator.presets.Engine that these settings change."""
        fields = {
            "schedule_conservativeness": self.conservativeness,
            "clip_max_new_tokens": self.clip_tokens,
        }
        return {name: value for name, value in fields.items() if value is not None}


def policy_argument(text: str) -> str:
    """Return a policy of the command line unchanged, after a check."""
    try:
        Rival.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def by_arrival(spec: str) -> str:
    """Return a policy with the same admission that serves requests in order of arrival.

    It measures the rate that a server sustains. An order by length would make that rate look
    higher: beyond it, such an order serves only short requests, which take less work.
    """
    policy, at, settings = spec.partition("@")
    if policy in policy_names():
        return "fcfs-fill"
    return f"fcfs{at}{settings}" if policy in _ORDERS_BY_LENGTH else spec
