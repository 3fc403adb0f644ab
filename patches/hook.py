"""Hooks into SGLang. Each names its target and fails loudly if the target does not fit."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.version import __version__ as sglang_release

from patches.compat import CALLS, UnsupportedServerError

logger = logging.getLogger(__name__)

_applied: set[str] = set()
_SOURCE = HookSource(plugin_name="sage_sched", dist_name="sage-sched")


@dataclass(frozen=True, slots=True)
class Hook:
    """One hook into SGLang.

    target: dotted path of a function or method of SGLang.
    kind: AFTER, AROUND or BEFORE.
    hook: the function to call, with the signature that sglang/srt/plugins/hook_registry.py
        documents for the kind.
    parameters: names of the target's parameters that the hook relies on.
    """

    target: str
    kind: Any
    hook: Callable[..., Any]
    parameters: tuple[str, ...]

    def check(self) -> None:
        """Raise UnsupportedServerError if the target does not fit (see check_target)."""
        check_target("hook", self.target, self.parameters)

    def apply(self) -> None:
        """Check the target, then hook it once per process: a second engine finds the hook in
        place."""
        if self.target in _applied:
            return
        self.check()
        # Trap: HookRegistry.apply_hooks only logs failures, and drops a hook on a target that
        # another plugin has hooked.
        HookRegistry._apply_target(self.target, [(self.kind, self.hook, _SOURCE)])
        HookRegistry._patched.add(self.target)
        _applied.add(self.target)


_F = TypeVar("_F", bound=Callable[..., Any])


class Hooks(list[Hook]):
    """A list of hooks, which are applied in its order."""

    def at(self, target: str, kind: Any, *parameters: str) -> Callable[[_F], _F]:
        """Return a decorator that hooks the decorated function at a target (see Hook)."""

        def add(hook: _F) -> _F:
            self.append(Hook(target, kind, hook, parameters))
            return hook

        return add

    def check(self) -> None:
        """Raise UnsupportedServerError for the first hook that does not fit."""
        for hook in self:
            hook.check()

    def apply(self) -> None:
        """Apply all hooks. Raise UnsupportedServerError for the first that does not fit."""
        for hook in self:
            hook.apply()


def check_target(use: str, target: str, parameters: Iterable[str]) -> None:
    """Raise UnsupportedServerError unless this function or method of SGLang has these parameters.

    use: our use of it, for the message.
    """
    where, _, name = target.rpartition(".")
    try:
        known = inspect.signature(getattr(pkgutil.resolve_name(where), name)).parameters
    except (ImportError, AttributeError) as error:
        why = _missing(where) or error
        raise _misfit(use, target, f"is not there ({why})") from error
    missing = [parameter for parameter in parameters if parameter not in known]
    if missing:
        raise _misfit(use, target, f"has no parameter {', '.join(missing)}")


def _missing(where: str) -> ModuleNotFoundError | None:
    """Return the error for a missing package that keeps a module of SGLang from being imported.
    resolve_name would only say that the module is missing."""
    for module in accumulate(where.split("."), "{}.{}".format):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            return None if module.startswith(error.name or "") else error
    return None


def _misfit(use: str, target: str, what: str) -> UnsupportedServerError:
    return UnsupportedServerError(
        f"the {use} {target} of SGLang {sglang_release} {what}, so sage-sched cannot "
        "schedule here. Install a supported release, or choose one of SGLang's own policies."
    )


def check_calls() -> None:
    """Raise UnsupportedServerError for the first function in CALLS that does not fit."""
    for target, parameters in CALLS:
        check_target("function", target, parameters)


_failed: set[str] = set()


def harmless(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with errors suppressed: it returns None instead, and its first error is
    logged."""

    @wraps(function)
    def guarded(*args: Any, **kw: Any) -> Any:
        try:
            return function(*args, **kw)
        except Exception:
            if function.__qualname__ not in _failed:
                _failed.add(function.__qualname__)
                logger.exception("sage-sched: %s failed; requests go on", function.__qualname__)
            return None

    return guarded


# The original coroutine method of SGLang, as an AROUND hook receives it.
Awaited = Callable[..., Awaitable[Any]]

AFTER, AROUND, BEFORE = HookType.AFTER, HookType.AROUND, HookType.BEFORE
