"""How a length distribution and hints travel from the HTTP process to the schedulers.

As flat lists under reserved keys of `sampling_params.custom_params`, the one part of a request
that every hop of SGLang passes on as it is (sglang/srt/sampling/sampling_params.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sage_sched.distribution import LengthDistribution
from sage_sched.job import NO_HINTS, Hints

_PREFIX = "__sage_"
_LENGTHS = _PREFIX + "lengths"
_HINT_PREFIX = _PREFIX + "hint_"
_HINTS = tuple(field.name for field in dataclasses.fields(Hints))


def encode(distribution: LengthDistribution) -> dict[str, Any]:
    """The reserved keys of a distribution, and their values."""
    return {_PREFIX + name: value for name, value in distribution.as_fields().items()}


def encode_hints(hints: Hints) -> dict[str, Any]:
    """The reserved keys of hints that were given, and their values."""
    given = {name: getattr(hints, name) for name in _HINTS}
    return {
        _HINT_PREFIX + name: value
        for name, value in given.items()
        if value != getattr(NO_HINTS, name)
    }


def decode(custom_params: object) -> LengthDistribution | None:
    """The distribution in a request's custom_params, or None. Raises ValueError if malformed."""
    if not isinstance(custom_params, Mapping) or _LENGTHS not in custom_params:
        return None
    fields = _after(_PREFIX, custom_params)
    return LengthDistribution.from_fields(fields)


def decode_hints(custom_params: object) -> Hints:
    """The hints in a request's custom_params. Raises ValueError if malformed."""
    if not isinstance(custom_params, Mapping):
        return NO_HINTS
    return hints_of(_after(_HINT_PREFIX, custom_params))


def hints_of(fields: Mapping[str, Any]) -> Hints:
    """Hints from those of the fields that are named so. Raises ValueError if malformed."""
    given = {name: fields[name] for name in _HINTS if name in fields}
    return Hints(**given) if given else NO_HINTS


def _after(prefix: str, custom_params: Mapping[Any, Any]) -> dict[str, Any]:
    """The values whose keys begin with a prefix, by what follows it."""
    return {
        key.removeprefix(prefix): value
        for key, value in custom_params.items()
        if isinstance(key, str) and key.startswith(prefix)
    }


def strip(custom_params: object) -> object:
    """custom_params without the reserved keys, so that no client writes himself a short job."""
    if not isinstance(custom_params, Mapping):
        return custom_params
    return {
        key: value
        for key, value in custom_params.items()
        if not (isinstance(key, str) and key.startswith(_PREFIX))
    }
