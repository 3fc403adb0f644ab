"""Sockets of a predictor service: how to listen on them, and how to connect to them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from predictor_store.cached_file import cache_folder, expanded, read_own
from sage_sched.address import Address
from sage_sched.config import PredictorConfig
from sage_sched.fields import UserError

TOKEN_VARIABLE = "SAGE_PREDICTOR_TOKEN"
_MIN_TOKEN_CHARS = 16
_MAX_TOKEN_BYTES = 4096
_CONNECT_SECONDS = 10.0
_BACKLOG = 128
_MOST_TURNS, _TURN_SECONDS = 50, 0.1
# After so long a silence, the other host counts as gone.
_GONE_SECONDS = 60


class PredictorError(UserError):
    """A prediction worker did not come up, cannot be reached or will not serve; the message says
    why."""


def default_address() -> Address:
    return Address(path=str(cache_folder() / "predictor.socket"))


def token_of(config: PredictorConfig) -> str:
    """The token that a service on TCP asks for, from file or environment; "" if there is none.
    Raises PredictorError."""
    named, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "").strip()
    if config.service_token_file:
        try:
            file = expanded(config.service_token_file)
            named, token = f"the file {file}", read_own(file, _MAX_TOKEN_BYTES).decode().strip()
        except (OSError, UnicodeError) as error:
            raise PredictorError(f"predictor.service_token_file: {error}") from error
    elif not token:
        return ""
    if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise PredictorError(
            f"the token of {named} must have {_MIN_TOKEN_CHARS} printable ASCII characters at least"
        )
    return token


def listen(address: Address) -> socket.socket:
    """On TCP, or on a Unix socket that only its owner may connect to. Raises PredictorError."""
    try:
        if address.is_tcp:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            at = (address.host, address.port)
            return socket.create_server(at, family=family, backlog=_BACKLOG)
        return _listen_on_unix(_path(address))
    except OSError as error:
        raise PredictorError(f"cannot listen on {address}: {error}") from error


def _listen_on_unix(path: Path) -> socket.socket:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _in_turn(path.parent):
        remove_dead(path)
        listener = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o177)  # mode 0600 from the first moment on
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(mask)
    return listener


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Of services that begin to listen in this folder, one at a time: while one looks whether a
    socket is dead, another could put its own there. Goes on after a few seconds in any case."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_MOST_TURNS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # another has it, or there are no locks here
                time.sleep(_TURN_SECONDS)
        yield
    finally:
        os.close(fd)


def remove_dead(path: Path) -> None:
    """Removes the file that a killed service left. Raises PredictorError if it is anything else."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(about.st_mode) or about.st_uid != os.geteuid():
        raise PredictorError(f"{path} is there, and is no socket of this user's own: move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass  # it is hung
    raise PredictorError(f"another service listens on {path}: stop it, or name another path")


def close(listener: socket.socket) -> None:
    """Stops listening, and removes the file of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            os.unlink(listener.getsockname())
    listener.close()


def connect(address: Address) -> socket.socket:
    """Blocks. Raises OSError; PermissionError if a Unix socket is another user's, who would learn
    prompts."""
    if address.is_tcp:
        connected = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
        set_up(connected)
        return connected
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(_CONNECT_SECONDS)
        connected.connect(str(_path(address)))
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, owner, _ = struct.unpack("3i", credentials)
        if owner not in (os.geteuid(), 0):
            raise PermissionError(f"{address} is a service of another user ({owner})")
    except BaseException:
        connected.close()
        raise
    return connected


def set_up(connected: socket.socket) -> None:
    """Sets options at either end of a connection. Over TCP, data is sent at once, and a host that
    is gone is noticed. Raises OSError."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _GONE_SECONDS // 2),
        (socket.TCP_KEEPINTVL, _GONE_SECONDS // 6),
        (socket.TCP_KEEPCNT, 3),
        # For data that is sent and not acknowledged; the default is a quarter of an hour.
        (socket.TCP_USER_TIMEOUT, 1000 * _GONE_SECONDS),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _path(address: Address) -> Path:
    return expanded(address.path)
