"""Carries length distributions and hints from the HTTP process to the schedulers.

They travel as flat lists under reserved keys of `sampling_params.custom_params`, the one part of a
request that every hop of SGLang passes on unchanged (sglang/srt/sampling/sampling_params.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predictor_store.predict.asked import digest
from sage_sched.distribution import LengthDistribution
from sage_sched.job import CLIENTS_HINTS, NO_HINTS, BatchPart, Hints

_PREFIX = "__sage_"
_HINT_PREFIX = _PREFIX + "hint_"
_HINTS = tuple(field.name for field in dataclasses.fields(Hints))
_ASKED = _PREFIX + "asked"
_BATCH = _PREFIX + "batch"
# Marks a request that only asks how long it would take (patches/scheduler/overload.py).
DRY_RUN = {_PREFIX + "dry_run": True}
# Ids are cut to this length: clients choose them, and schedulers keep data derived from them for
# minutes.
_MAX_ID_CHARS = 128


def _clock() -> str:
    """Return a name for this host's time.monotonic() clock, which counts from boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    # Hosts restored from one image have the same boot id, but clocks of their own.
    return hashlib.blake2b(f"{boot}{platform.node()}".encode(), digest_size=6).hexdigest()


CLOCK = _clock()
# An older stamp is ignored, because no request waits longer than this for its prediction.
_MOST_AGE_S = 3600.0


def encode(distribution: LengthDistribution) -> dict[str, Any]:
    """Return a distribution's fields under reserved keys."""
    return {_PREFIX + name: value for name, value in distribution.as_fields().items()}


def encode_hints(hints: Hints) -> dict[str, Any]:
    """Return the hints that a client gave, under reserved keys."""
    return {
        _HINT_PREFIX + name: value
        for name in _HINTS
        if (value := getattr(hints, name)) != getattr(NO_HINTS, name)
    }


def encode_asked(rid: str, came_s: float, begun_s: float) -> dict[str, Any]:
    """Return, under a reserved key, a request's id as its client knows it, and the times when it
    arrived and when its HTTP process began to process it. Both times are on this host's clock."""
    return {_ASKED: [short_id(rid), came_s, begun_s, CLOCK]}


def short_id(rid: str) -> str:
    """Return an id of bounded length, equal for equal ids: a long id becomes its beginning and a
    digest."""
    if len(rid) <= _MAX_ID_CHARS:
        return rid
    whole = hashlib.blake2b(rid.encode("utf-8", "replace"), digest_size=12)
    return rid[:_MAX_ID_CHARS] + whole.hexdigest()


def decode(custom_params: object) -> LengthDistribution | None:
    """Return the distribution in a request's custom_params, or None. Raises ValueError if
    malformed."""
    fields = _after(_PREFIX, custom_params)
    return LengthDistribution.from_fields(fields) if "lengths" in fields else None


def decode_hints(custom_params: object) -> Hints:
    """Return the hints in a request's custom_params. Raises ValueError if malformed."""
    return _hints(_after(_HINT_PREFIX, custom_params), _HINTS)


def clients_hints(custom_params: Mapping[str, Any]) -> Hints:
    """Return the hints that a client may give. Raises ValueError if malformed."""
    return _hints(custom_params, CLIENTS_HINTS)


def _hints(fields: Mapping[str, Any], names: tuple[str, ...]) -> Hints:
    given = {name: fields[name] for name in names if name in fields}
    return Hints(**given) if given else NO_HINTS


def decode_asked(custom_params: object) -> tuple[str, float, float] | None:
    """Return the client's id, the arrival and the start of processing (see encode_asked), or None
    if absent."""
    match custom_params.get(_ASKED) if isinstance(custom_params, Mapping) else None:
        case [str() as rid, float() as came_s, float() as begun_s, *_]:
            return rid, came_s, begun_s
    return None


def encode_batch(part: BatchPart) -> dict[str, Any]:
    """Return the batch that a request is a part of, under a reserved key."""
    return {_BATCH: [part.name, part.num_requests, part.done_in_s]}


def decode_batch(custom_params: object) -> BatchPart | None:
    """Return the batch that a request is a part of, or None. Raises ValueError if malformed."""
    match custom_params.get(_BATCH) if isinstance(custom_params, Mapping) else None:
        case None:
            return None
        case [str() as name, int() as num_requests, float() as done_in_s]:
            return BatchPart(name, num_requests, done_in_s)
    raise ValueError("a request's batch is malformed")


def is_dry_run(custom_params: object) -> bool:
    """Whether a request carries DRY_RUN."""
    return isinstance(custom_params, Mapping) and DRY_RUN.items() <= custom_params.items()


def session_of(session_id: str) -> str:
    """Return the session hint for one of SGLang's own sessions, which clients open, name and
    close."""
    return digest("SGLang's", session_id)


def came_at_s(custom_params: object, now_s: float, clock: str = CLOCK) -> float:
    """Return when a request came. It is now_s if the stamp is absent, impossible, or of another
    host's clock (--nnodes).

    clock: the name of the clock that now_s was read from.
    """
    match custom_params.get(_ASKED) if isinstance(custom_params, Mapping) else None:
        case [str(), float() as came_s, float(), str() as theirs] if theirs == clock:
            return came_s if now_s - _MOST_AGE_S <= came_s <= now_s else now_s
    return now_s


def _after(prefix: str, custom_params: object) -> dict[str, Any]:
    """Return the values whose keys begin with a prefix, keyed by the rest of the key."""
    return {
        key.removeprefix(prefix): value
        for key, value in (custom_params.items() if isinstance(custom_params, Mapping) else ())
        if isinstance(key, str) and key.startswith(prefix)
    }


def strip(custom_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return custom_params without the reserved keys, so that no client can claim to be a short
    job."""
    return {
        key: value
        for key, value in custom_params.items()
        if not (isinstance(key, str) and key.startswith(_PREFIX))
    }
