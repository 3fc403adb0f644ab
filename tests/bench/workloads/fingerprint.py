"""A short name of a large result, which changes with it."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, is_dataclass
from typing import Any

import numpy as np

from bench.simulator.request import SimRequest


def fingerprint(found: Any) -> str:
    return hashlib.sha256(repr(_plain(found)).encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    """Return it as lists, with rounded numbers, because hosts differ in the last digit."""
    if isinstance(value, SimRequest) and value.batch is None:
        value = astuple(value)[:-1]  # most requests have no batch
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value
