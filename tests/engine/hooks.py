"""Hooks of the plugins for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any


def around(owner: type, name: str, hook: Callable[..., Any]) -> None:
    """Call `hook` instead of a method, with the bound method and its arguments. SGLang's own
    registry drops a hook whose target another plugin has hooked."""
    original = getattr(owner, name)

    @wraps(original)
    def hooked(self: Any, *args: Any, **kw: Any) -> Any:
        return hook(partial(original, self), self, *args, **kw)

    setattr(owner, name, hooked)
