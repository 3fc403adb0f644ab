"""Where this package finds its own parts.

The parts beside the core have names that a user's own packages may have too (`patches`, `bench`).
So a wheel keeps them in a folder that nobody looks into, sage_sched/parts (setup.py), and whoever
needs them calls `find_parts` first. From then on ours are found under these names in this process,
whatever else is in its way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.resources import files
from types import ModuleType

# What a server needs of them, and what else the commands do.
SERVING = ("patches", "predictor_store")
ALL = (*SERVING, "bench")


class PartsError(ImportError):
    """Somebody else's package of one of these names is in use in this process."""


class _PartsFinder:
    """Finds the top-level packages of these names in `folder`, and nothing else."""

    def __init__(self, folder: str, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self.folder]) if name in self.names else None


def parts_folder() -> str:
    """The folder that holds them: of an installed wheel, or of a checkout."""
    package = files("sage_sched")
    parts = package / "parts"
    return str(parts) if parts.is_dir() else str(package).rpartition("/")[0]


def find_parts(names: Sequence[str] = SERVING) -> None:
    """Make ours the ones that are found under these names. Raises PartsError if another package of
    one of them has been imported already: both cannot be had in one process."""
    folder = parts_folder()
    for name in names:
        places = list(getattr(sys.modules.get(name), "__path__", []))
        if places and f"{folder}/{name}" not in places:
            raise PartsError(
                f"sage-sched: this process has imported another package {name!r}, from "
                f"{places[0]}. Rename that one, or start the server in a process of its own "
                "(`sage-sched serve`)."
            )
    if not _is_found(names):
        sys.meta_path.insert(0, _PartsFinder(folder, names))


def _is_found(names: Sequence[str]) -> bool:
    ours = (finder for finder in sys.meta_path if isinstance(finder, _PartsFinder))
    return any(set(names) <= set(finder.names) for finder in ours)
