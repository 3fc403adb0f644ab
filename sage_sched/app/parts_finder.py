"""Finds the parts of this package outside the core: `patches`, `predictor_store` and `bench`.

A user's own packages may have these names too. So a wheel keeps the parts in sage_sched/parts
(setup.py), a folder that is on no import path, and code that needs them calls `find_parts` first.
From then on this process finds our parts under these names, even if other packages have the same
names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.resources import files
from types import ModuleType
from typing import ClassVar

# The parts that a server needs, and the parts that the commands need.
SERVING = ("patches", "predictor_store")
ALL = (*SERVING, "bench")


class PartsError(ImportError):
    """This process has already imported another package with the name of one of our parts."""


class _PartsFinder:
    """Finds the top-level packages of `names` among our parts, and nothing else."""

    names: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [parts_folder()]) if name in cls.names else None


def parts_folder() -> str:
    """Return the folder of the parts, in an installed wheel or in a checkout."""
    package = files("sage_sched")
    parts = package / "parts"
    return str(parts) if parts.is_dir() else str(package).rpartition("/")[0]


def find_parts(names: Sequence[str] = SERVING) -> None:
    """Find our parts under these names from now on. Raises PartsError if another package of one of
    these names has been imported already, because a process cannot have both."""
    folder = parts_folder()
    for name in names:
        places = list(getattr(sys.modules.get(name), "__path__", []))
        if places and f"{folder}/{name}" not in places:
            raise PartsError(
                f"sage-sched: this process has imported another package {name!r}, from "
                f"{places[0]}. Rename that one, or start the server in a process of its own "
                "(`sage-sched serve`)."
            )
    _PartsFinder.names.update(names)
    if _PartsFinder not in sys.meta_path:
        sys.meta_path.insert(0, _PartsFinder)
