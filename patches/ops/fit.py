"""What of sage-sched does not fit the SGLang that is installed: `python -m patches.ops.fit`.

A server stops at the first thing that does not fit. This goes through all of them, whatever the
release is called, so it also says what a new release would take.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import patches
from patches.compat import CALLS
from predictor_store.torchvision_schemas import define_missing
from sage_sched.config import ExportConfig, SageConfig

if TYPE_CHECKING:
    from patches.hook import Hook

# It places hooks when it is imported.
_NOT_IMPORTED = ("http_worker",)


def misfits() -> list[str]:
    """A line for each module of ours that this SGLang breaks, and for each hook and each call that
    does not fit it."""
    found = [*_modules()]
    for check in _checks():
        try:
            check()
        except Exception as error:
            found.append(f"{error}")
    return found


def targets() -> list[str]:
    """What we hook, in the order of the server's start. Raises if SGLang breaks our modules."""
    return [hook.target for hooks in _HOOKS for hook in hooks()]


def _modules() -> Iterator[str]:
    for module in pkgutil.iter_modules(patches.__path__):
        if module.name not in _NOT_IMPORTED:
            try:
                importlib.import_module(f"patches.{module.name}")
            except Exception as error:  # whatever SGLang's own modules raise
                yield f"patches.{module.name} cannot be imported: {type(error).__name__}: {error}"


def _checks() -> Iterator[Callable[[], None]]:
    """Of what can be checked: a module that cannot be imported has said so already."""
    with contextlib.suppress(ImportError):
        from patches.hook import check_target

        for hooks in _HOOKS:
            with contextlib.suppress(ImportError):
                for hook in hooks():
                    yield hook.check
        for target, parameters in CALLS:
            yield partial(check_target, "function", target, parameters)


def _scheduler_hooks() -> Iterable[Hook]:
    from patches.scheduler.hooks import scheduler_hooks

    return scheduler_hooks(SageConfig(export=ExportConfig(predicted_load=True)))


def _first_hooks() -> Iterable[Hook]:
    from patches.plugin import first_hooks

    return first_hooks(of_scheduler=True, of_controller=True)


def _predict_hooks() -> Iterable[Hook]:
    from patches.http.hooks import http_hooks

    return http_hooks


def _controller_hooks() -> Iterable[Hook]:
    from patches.http.replica_watch import controller_hooks

    return controller_hooks


def _router_hooks() -> Iterable[Hook]:
    from patches.http.hooks import router_hooks

    return router_hooks


# In the order of a server's start.
_HOOKS = (_first_hooks, _scheduler_hooks, _controller_hooks, _predict_hooks, _router_hooks)


def main() -> int:
    """Prints what does not fit; exit status 1 if anything."""
    define_missing()  # older releases import torchvision with the package itself
    from sglang.version import __version__

    found = misfits()
    for line in found:
        print(line)
    print(f"SGLang {__version__}: {len(found)} misfits" if found else f"SGLang {__version__} fits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
