"""Parses the sections of the configuration, and describes the values that their fields allow.

A section is a frozen dataclass whose fields all have defaults. The annotation of a field gives its
range, the end of its name gives its unit, and the text below it explains it
(sage_sched.app.schema).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from sage_sched.errors import UserError

# The largest number that may be set. A field without a maximum may also be infinite.
MOST = 1_000_000_000
Share = Annotated[float, Meta(ge=0, le=1)]
# A smaller share of a KV pool is less than one token of any pool.
Pools = Annotated[float, Meta(ge=1e-6, le=MOST)]
# Errors that reading JSON, and taking the expected values from it, may raise.
MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


class ConfigError(UserError, ValueError):
    """A field is unknown, of the wrong type, or out of range. The message names field, value and
    range."""


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(f"{name} is {value!r:.80}, allowed: {allowed}")


def require_known(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """Raise ConfigError for the first unknown name."""
    for name in given:
        if name not in known:
            (meant, *_) = [*get_close_matches(f"{name}", known, 1), ""]
            guess = f" (did you mean {meant}?)" if meant else ""
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"unknown {what} {name!r:.80}{guess}, allowed: {allowed}")


def parse_section(section: type[Any], name: str, values: object, /, **parsed: Any) -> Any:
    """Return an object of a section from a mapping. Raises ConfigError.

    parsed: fields that are not in the mapping.
    """
    hints = {key: hint for key, hint in hints_of(section).items() if key not in parsed}
    given = mapping(f"section {name}", values, "fields with values")
    require_known(given, hints, f"field of section {name}")
    found = {key: parse(f"{name}.{key}", hints[key], given[key]) for key in given}
    return section(**found, **parsed)


def parse(name: str, hint: Any, value: object) -> Any:
    """Return a value as its annotation says: a plain value, a section, or sections by name. Raises
    ConfigError."""
    section = section_in(hint)
    if section is None:
        return _plain(name, hint, value)
    if get_origin(hint) is not Mapping:
        return parse_section(section, name, value)
    given = mapping(name, value, f"sections [{name}.NAME]")
    return {key: parse_section(section, f"{name}.{key}", given[key]) for key in given}


def _plain(name: str, hint: Any, value: object) -> Any:
    try:
        parsed = msgspec.convert(value, hint)
        # Written so that NaN fails too.
        fits = not isinstance(parsed, int | float) or parsed <= MOST or parsed == math.inf
    except (msgspec.ValidationError, UnicodeError):
        fits = False
    if not fits:
        raise ConfigError(
            f"{name} is {value!r:.80}, allowed: {allowed(name, msgspec.json.schema(hint))}"
        )
    return parsed


def mapping(name: str, given: object, allowed: str) -> Mapping[str, Any]:
    """Return the given mapping. Raises ConfigError if it is not a mapping from names."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r:.80}, allowed: {allowed}")
    for key in given:
        require(isinstance(key, str), f"a name in {name}", key, "a text")
    return given


def hints_of(section: type[Any]) -> dict[str, Any]:
    """Return the annotation of each field."""
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def section_in(hint: Any) -> type[Any] | None:
    """Return the section that an annotation names, also in a mapping or together with None."""
    named = (one for one in (hint, *get_args(hint)) if isinstance(one, type))
    return next(filter(dataclasses.is_dataclass, named), None)


_UNITS = {"ms": " (ms)", "gib": " (GiB)", "pools": " (KV pools)"}
_KINDS = {
    "number": "a number", "integer": "a whole number", "boolean": "true or false",
    "string": "a text",
}  # fmt: skip
_BOUNDS = {
    "minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "to below",
}  # fmt: skip


def allowed(name: str, schema: Mapping[str, Any]) -> str:
    """Return the values that a field may have, in words, from the JSON schema of its value."""
    if "enum" in schema:
        return ", ".join(map(repr, schema["enum"]))
    bounds = [f"{said} {schema[bound]:.10g}" for bound, said in _BOUNDS.items() if bound in schema]
    if schema["type"] == "number" and len(bounds) < 2:
        bounds.append(f"to {MOST}, or inf")
    return " ".join([_KINDS[schema["type"]], *bounds]) + _UNITS.get(name.rpartition("_")[2], "")
