"""Checks of configured fields, and how a section of the configuration becomes an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A field is unknown, of the wrong type, or out of range. Names field, value and range."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raises ConfigError unless ok."""
    if not ok:
        raise ConfigError(f"{name} is {value!r}, allowed: {allowed}")


def require_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError for the first name that is not known."""
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}, allowed: {', '.join(known) or 'none'}")


def parse_section(section: type[Any], name: str, values: object, **parsed: Any) -> Any:
    """An object of a frozen dataclass whose fields all have defaults, from a mapping. Raises
    ConfigError. parsed: fields that are not in the mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"section {name} is {values!r}, allowed: fields with values")
    types = {f.name: type(f.default) for f in dataclasses.fields(section)}
    require_known(values, types, f"field of section {name}")
    for key, value in values.items():
        wanted: type[Any] = types[key]
        if wanted not in (bool, int, float, str):
            raise ConfigError(
                f"{name}.{key} cannot be set in a file: its default is no plain value"
            )
        # A bool is an int in Python; an int where a float is wanted is fine.
        fits = type(value) is wanted or (wanted is float and type(value) is int)
        require(fits, f"{name}.{key}", value, f"a value of type {wanted.__name__}")
        parsed[key] = wanted(value)
    return section(**parsed)
