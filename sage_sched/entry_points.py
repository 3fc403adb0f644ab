"""Defines the entry points that SGLang calls. No other module of ours imports this one."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from sage_sched.app.parts_finder import PartsError, find_parts

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks. Entry point of the group sglang.srt.plugins."""
    try:
        find_parts()
    except PartsError as error:
        logger.error("%s", error)  # otherwise SGLang says only that it does not know the policy
        raise
    import_module("patches.plugin").register()


def activate() -> str | None:
    """Activate the platform. Entry point of the group sglang.srt.platforms."""
    find_parts()
    platform: str | None = import_module("patches.platform").activate()
    return platform


def __getattr__(name: str) -> Any:
    """Return `app`, which the HTTP processes of --tokenizer-worker-num serve. SGLang loads no
    plugin in them, so our packages are found here."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    find_parts()
    return import_module("patches.http.worker").app
