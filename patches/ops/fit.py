"""Lists our code that does not fit the installed SGLang: `python -m patches.ops.fit`.

A server stops at the first misfit. This tool finds all of them, in any release, so it also shows
the work that a new release needs.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import patches
from patches.compat import CALLS
from predictor_store.torchvision_schemas import define_missing
from sage_sched.app.config import ProbeConfig, SageConfig

# This module places hooks when it is imported.
_NOT_IMPORTED = ("patches.http.worker",)
_MANAGERS = "sglang.srt.managers"
# All hooks, in the order in which a server's start places them. An entry names a list of hooks, or
# a function that returns one, with its arguments.
_HOOKS: tuple[tuple[Any, ...], ...] = (
    (
        "patches.plugin:first_hooks",
        (f"{_MANAGERS}.scheduler", f"{_MANAGERS}.data_parallel_controller"),
    ),
    ("patches.scheduler.hooks:scheduler_hooks", SageConfig(probe=ProbeConfig(record="states"))),
    ("patches.http.hooks:http_hooks",),
    ("patches.http.hooks:router_hooks",),
)


def misfits() -> list[str]:
    """Return a line for each module, hook and call of ours that does not fit this SGLang."""
    found = []
    for module in pkgutil.walk_packages(patches.__path__, f"{patches.__name__}."):
        if module.name not in _NOT_IMPORTED:
            try:
                import_module(module.name)
            except Exception as error:  # SGLang's own modules may raise anything
                found.append(f"{module.name} cannot be imported: {type(error).__name__}: {error}")
    for check in _checks():
        try:
            check()
        except Exception as error:
            found.append(f"{error}")
    return [*dict.fromkeys(found)]


def targets() -> list[str]:
    """Return the hooked targets, in the order of the server's start. Raises if SGLang breaks our
    modules."""
    return [*dict.fromkeys(hook.target for place in _HOOKS for hook in _made(*place))]


def _made(place: str, *arguments: Any) -> Iterable[Any]:
    hooks: Any = pkgutil.resolve_name(place)
    return [*(hooks(*arguments) if arguments else hooks)]


def _checks() -> Iterator[Callable[[], None]]:
    """Return the checks that can run. Modules that cannot be imported have been reported
    already."""
    with contextlib.suppress(ImportError):
        from patches.hook import check_target

        for place in _HOOKS:
            with contextlib.suppress(ImportError):
                yield from (hook.check for hook in _made(*place))
        yield from (partial(check_target, "function", *call) for call in CALLS)


def main() -> int:
    """Print all misfits; exit status 1 if there are any."""
    define_missing()  # older releases import torchvision with the package itself
    from sglang.version import __version__

    found = misfits()
    for line in found:
        print(line)
    print(f"SGLang {__version__}: {len(found)} misfits" if found else f"SGLang {__version__} fits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
