"""Defines the entry points that SGLang calls. No other module of ours imports this one."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def register() -> None:
    """Register the hooks. Entry point of the group sglang.srt.plugins."""
    import_module("patches.plugin").register()


def activate() -> str | None:
    """Activate the platform. Entry point of the group sglang.srt.platforms."""
    platform: str | None = import_module("patches.platform").activate()
    return platform


def __getattr__(name: str) -> Any:
    """Return `app`, which the HTTP processes of --tokenizer-worker-num serve."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("patches.http.worker").app
