"""Files of ours in the user's cache: what takes long to make, or is learned, and can be lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

_DIGEST_BYTES = 32


def cache_folder() -> Path:
    """Where a server keeps what is told no other place."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "sage-sched"


def read_cached(path: Path) -> bytes | None:
    """What write_cached wrote there; None if it is not there, damaged, or not this user's own."""
    try:
        # Whoever else could write it could have us run a model of theirs.
        with open(path, "rb", opener=_open_own) as file:
            digest, content = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return content if digest == _digest(content) else None


def _open_own(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(f"{path} is no file of this user's own")
    return fd


def write_cached(path: Path, content: bytes) -> None:
    """Replace the file as a whole, readable for its user alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(fd, "wb") as file:
            file.write(_digest(content) + content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
