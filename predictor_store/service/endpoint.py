"""Opens and connects the ZeroMQ endpoints of a predictor service, and decides who may use them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils import z85

from predictor_store.cached_file import cache_folder, expanded, read_own
from predictor_store.service.messages import MAX_BYTES
from sage_sched.app.address import Address
from sage_sched.app.config import PredictorConfig
from sage_sched.errors import UserError

TOKEN_VARIABLE = "SAGE_PREDICTOR_TOKEN"
_MIN_TOKEN_CHARS = 16
_MAX_TOKEN_BYTES = 4096
# The maximum number of messages that wait for one peer, at either end. Further messages are refused
# or dropped. A usual prompt has 1 KB, the longest 16 KB.
_HIGH_WATER_MARK = 10_000
# A connection must prove its key within this time.
_HANDSHAKE_MS = 10_000
_BACKLOG = 1024
_HEARTBEAT_MS = 10_000
# After this much silence, the other host is considered gone.
_GONE_MS = 60_000
# A closed socket may send its last messages for this long.
_LINGER_MS = 1_000
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_MONITOR_STOPPED
)
_MOST_TURNS, _TURN_SECONDS = 50, 0.1


class PredictorError(UserError):
    """A prediction worker did not start, cannot be reached or refuses. The message says why."""


def default_address() -> Address:
    return Address(path=str(cache_folder() / "predictor.socket"))


def token_of(config: PredictorConfig) -> str:
    """Return the token of a service on TCP, from file or environment; "" if there is none. Raises
    PredictorError."""
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
            f"the token of {named} must have at least {_MIN_TOKEN_CHARS} printable ASCII characters"
        )
    return token


def listen(address: Address, token: str = "") -> zmq.Socket[bytes]:
    """Listen on an address; return a ROUTER. token: for TCP. Raises PredictorError."""
    router = _socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
    router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    try:
        if address.is_tcp:
            _set_up_tcp(router)
            router.curve_server = True
            router.curve_secretkey = _service_key(token)
            router.bind(_tcp_endpoint(address))
        else:
            _bind_path(router, expanded(address.path))
    except BaseException as error:
        router.close()
        if isinstance(error, OSError | zmq.ZMQError):
            raise PredictorError(f"cannot listen on {address}: {error}") from error
        raise
    return router


def close(router: zmq.Socket[bytes]) -> None:
    """Stop listening, and remove the file of a Unix socket."""
    at = router.getsockopt_string(zmq.LAST_ENDPOINT)
    if at.startswith("ipc://"):
        # The file is removed first: while this service listens, no other one takes the path.
        Path(at.removeprefix("ipc://")).unlink(missing_ok=True)
    router.close()


def connect(address: Address, token: str = "") -> zmq.Socket[bytes]:
    """Return a connected DEALER, which does not reconnect; its monitor socket reports when it is
    LOST.

    It sends nothing until the service has proven that it knows the token. Raises OSError, and
    PermissionError if the socket belongs to another user, who would learn prompts.
    """
    if not address.is_tcp:
        path = expanded(address.path)
        owner = path.stat().st_uid
        if owner not in (os.geteuid(), 0):
            raise PermissionError(f"{address} is a service of another user ({owner})")
    dealer = _socket(zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    dealer.get_monitor_socket(LOST, f"inproc://{uuid.uuid4()}")
    if address.is_tcp:
        _set_up_tcp(dealer)
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = zmq.curve_public(_service_key(token))
        dealer.connect(f"tcp://{address}")
    else:
        dealer.connect(f"ipc://{path}")
    return dealer


def _socket(kind: int) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.set_hwm(_HIGH_WATER_MARK)
    made.setsockopt(zmq.LINGER, _LINGER_MS)
    return made


def _set_up_tcp(made: zmq.Socket[bytes]) -> None:
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _GONE_MS)


def _service_key(token: str) -> bytes:
    """Return the secret CURVE key of the service that has this token.

    Its public key never crosses the wire, so only holders of the token complete a handshake, on
    either side. scrypt makes guesses against a recorded handshake cost 50 ms each.
    """
    made = hashlib.scrypt(token.encode(), salt=b"sage-sched", n=1 << 14, r=8, p=1, dklen=32)
    return z85.encode(made)


def _tcp_endpoint(address: Address) -> str:
    # ZeroMQ binds only to addresses, not to names.
    (_, _, _, _, at), *_ = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return f"tcp://{Address(host=str(at[0]), port=address.port)}"


def _bind_path(router: zmq.Socket[bytes], path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _in_turn(path.parent):
        remove_dead(path)
        mask = os.umask(0o177)  # mode 0600 from the first moment on
        try:
            router.bind(f"ipc://{path}")
        finally:
            os.umask(mask)


@contextlib.contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Let one service at a time begin to listen in this folder, but wait a few seconds at most.
    Otherwise a service could remove a live socket that has just replaced a dead one."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_MOST_TURNS):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # another service has it, or there are no locks here
                time.sleep(_TURN_SECONDS)
        yield
    finally:
        os.close(fd)


def remove_dead(path: Path) -> None:
    """Remove the file that a killed service left. Raises PredictorError for any other file."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(about.st_mode) or about.st_uid != os.geteuid():
        raise PredictorError(f"{path} exists, but is not a socket of this user: move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # the service hangs
    raise PredictorError(f"another service listens on {path}: stop it, or name another path")
