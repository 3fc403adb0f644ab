"""The SGLang releases that the hooks are written for, and all that differs between them."""

from __future__ import annotations

SUPPORTED_RELEASES = ("0.5.23",)


class UnsupportedServerError(RuntimeError):
    """This SGLang, or the way it was started, cannot be served. The message says what to do."""


def check_release() -> None:
    """Raises UnsupportedServerError unless the installed SGLang is a supported release."""
    from sglang.version import __version__

    if __version__ not in SUPPORTED_RELEASES:
        raise UnsupportedServerError(
            f"SGLang {__version__} is installed, supported: {', '.join(SUPPORTED_RELEASES)}. "
            "Install a supported release, or choose one of SGLang's own policies."
        )
