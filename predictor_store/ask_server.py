"""Sends the requests of commands to a running SGLang server, with its key."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from sage_sched.errors import UserError

_KEY_VARIABLE = "SAGE_ADMIN_KEY"
_TIMEOUT_S = 60.0
# No answer or key is larger than this.
_MOST_BYTES = 64 * 2**20
_MOST_KEY_CHARS = 4096


class NoAnswerError(UserError):
    """No server answers, or its answer is not one of SGLang's."""


class RefusedError(UserError):
    """The server has refused the request. status: the HTTP status."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: the key is for the named server only."""


# The key is not for a proxy from the environment either.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)


def add_key(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help=f"a file with {whose} (default: the environment variable {_KEY_VARIABLE})",
    )


def key_of(file: str | None) -> str:
    """Return the key in a file, or else in the environment; "" if there is none. Raises OSError,
    and UserError, which does not show the key."""
    if file is None:
        place, key = f"environment variable {_KEY_VARIABLE}", os.environ.get(_KEY_VARIABLE, "")
    else:
        with open(file, encoding="utf-8", errors="replace") as opened:
            place, key = f"file {file}", opened.read(_MOST_KEY_CHARS).strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the key of the {place} is not one line of ASCII characters")
    return key


def ask(address: str, key: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """Return a server's JSON answer, as fetch. Raises NoAnswerError and RefusedError."""
    try:
        return json.loads(fetch(address, key, body, timeout_s))
    except (ValueError, RecursionError) as error:
        raise _odd(address, error) from error


def fetch(address: str, key: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Return a server's answer to a GET, or to a POST of body as JSON.

    No proxy is used and no redirect is followed, so the key reaches only that server. Raises
    NoAnswerError and RefusedError.
    """
    request = urllib.request.Request(
        address,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )
    try:
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                said: bytes = answer.read(_MOST_BYTES)
                if answer.length:  # the answer is incomplete
                    raise http.client.IncompleteRead(said, answer.length)
                return said
        except urllib.error.HTTPError as error:
            raise RefusedError(_reason(address, error), error.code) from error
    except OSError as error:
        said_of = f"no server answers at {address}: {getattr(error, 'reason', error)}"
        raise NoAnswerError(f"{said_of}; is that its address?") from error
    except (http.client.HTTPException, ValueError) as error:
        raise _odd(address, error) from error


def _odd(address: str, error: Exception) -> NoAnswerError:
    return NoAnswerError(f"{address} does not answer like an SGLang server: {error!r:.200}")


def _reason(address: str, error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(_MOST_BYTES))["error"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return f"{address} answers {error.code} {error.reason}"
