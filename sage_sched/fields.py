"""Checks of configured fields, and how a section of the configuration becomes an object."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

# What a number that is set may be at most: nobody means more.
MOST = 1_000_000_000
# So much of a KV pool is less than a token, of any.
LEAST_POOLS = 1e-6
# What reading JSON, and taking from it what should be there, may raise.
MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class UserError(Exception):
    """What was given is at fault, or cannot be had. The message says what, so that a command prints
    it in one line, without a traceback."""


class ConfigError(UserError, ValueError):
    """A field is unknown, of the wrong type, or out of range. Names field, value and range."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError unless ok."""
    if not ok:
        raise ConfigError(f"{name} is {value!r:.80}, allowed: {allowed}")


def require_within(
    name: str, value: float, least: float, most: float, *, or_inf: bool = False
) -> None:
    """Raises ConfigError unless the value is between the two, or infinite where that is allowed.
    A bound on both sides keeps what is computed from it a number."""
    allowed = f"{least:g} to {most:g}{', or inf' if or_inf else ''}"
    require(least <= value <= most or (or_inf and value == math.inf), name, value, allowed)


def require_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError for the first name that is not known."""
    for name in given:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"unknown {what} {name!r:.80}, allowed: {allowed}")


def parse_section(section: type[Any], name: str, values: object, **parsed: Any) -> Any:
    """An object of a frozen dataclass whose fields all have defaults, from a mapping. Raises
    ConfigError. parsed: fields that are not in the mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {name} is {values!r:.80}, allowed: fields with values")
    types = {f.name: type(f.default) for f in dataclasses.fields(section)}
    require_known(values, types, f"field of section {name}")
    for key, value in values.items():
        wanted: type[Any] = types[key]
        if wanted not in (bool, int, float, str):
            raise ConfigError(
                f"{name}.{key} cannot be set in a file: its default is no plain value"
            )
        # A bool is an int in Python; an int where a float is wanted is fine, if one is as large.
        fits = type(value) is wanted or (
            wanted is float and type(value) is int and abs(value) <= sys.float_info.max
        )
        require(fits, f"{name}.{key}", value, f"a value of type {wanted.__name__}")
        parsed[key] = wanted(value)
    made = section(**parsed)
    for key, value in values.items():
        is_number = not isinstance(value, float) or not math.isnan(value)
        require(is_number, f"{name}.{key}", value, "a number")
    return made
