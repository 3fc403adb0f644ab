"""How a length distribution and hints travel from the HTTP process to the schedulers.

As flat lists under reserved keys of `sampling_params.custom_params`, the one part of a request
that every hop of SGLang passes on as it is (sglang/srt/sampling/sampling_params.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sage_sched.distribution import LengthDistribution
from sage_sched.job import CLIENTS_HINTS, NO_HINTS, Hints

_PREFIX = "__sage_"
_LENGTHS = _PREFIX + "lengths"
_HINT_PREFIX = _PREFIX + "hint_"
_HINTS = tuple(field.name for field in dataclasses.fields(Hints))
_CAME = _PREFIX + "came_s"
_ASKED = _PREFIX + "asked"
_EXPLAIN = _PREFIX + "explain"
# Of SGLang's customized_info and of an answer's meta_info: what is said of a request.
EXPLANATION = "sage"
# A stamp is older than the tick that comes with it, but by no more than a request is awaited.
_MOST_AGE_S = 3600.0


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
    return _hints(_after(_HINT_PREFIX, custom_params), _HINTS)


def clients_hints(custom_params: Mapping[str, Any]) -> Hints:
    """What a client says of its request. Raises ValueError if malformed."""
    return _hints(custom_params, CLIENTS_HINTS)


def _hints(fields: Mapping[str, Any], names: tuple[str, ...]) -> Hints:
    given = {name: fields[name] for name in names if name in fields}
    return Hints(**given) if given else NO_HINTS


def encode_stamp(came_s: float) -> dict[str, Any]:
    """The reserved key that says when a request came, on the clock of the ticks."""
    return {_CAME: came_s}


def encode_asked(rid: str, came_s: float, begun_s: float) -> dict[str, Any]:
    """The reserved key that says by which id a client knows a request, when it came, and when its
    HTTP process began with it, on the clock of the ticks."""
    return {_ASKED: [rid, came_s, begun_s]}


def decode_asked(custom_params: object) -> tuple[str, float, float] | None:
    """The three; None where there are none."""
    match custom_params.get(_ASKED) if isinstance(custom_params, Mapping) else None:
        case [str() as rid, float() as came_s, float() as begun_s]:
            return rid, came_s, begun_s
    return None


def encode_explain() -> dict[str, Any]:
    """The reserved key by which a request's answer is to say what was predicted of it."""
    return {_EXPLAIN: True}


def decode_explain(custom_params: object) -> bool:
    """Whether it is there."""
    return isinstance(custom_params, Mapping) and custom_params.get(_EXPLAIN) is True


def decode_stamp(custom_params: object, now_s: float) -> float:
    """When a request came, as its stamp says; now where it has none, or one that cannot be."""
    came_s = custom_params.get(_CAME) if isinstance(custom_params, Mapping) else None
    if type(came_s) is float and now_s - _MOST_AGE_S <= came_s <= now_s:
        return came_s
    return now_s


def _after(prefix: str, custom_params: Mapping[Any, Any]) -> dict[str, Any]:
    """The values whose keys begin with a prefix, by what follows it."""
    return {
        key.removeprefix(prefix): value
        for key, value in custom_params.items()
        if isinstance(key, str) and key.startswith(prefix)
    }


def strip(custom_params: Mapping[str, Any]) -> dict[str, Any]:
    """custom_params without the reserved keys, so that no client writes himself a short job."""
    return {
        key: value
        for key, value in custom_params.items()
        if not (isinstance(key, str) and key.startswith(_PREFIX))
    }
