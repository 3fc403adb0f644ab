"""Reads and writes our files in the user's cache. Their content is learned, so losing it does no
harm."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Return the absolute path, with ~ as the home folder. Raises OSError if the path is no file
    name, or the home folder is unknown."""
    if "\0" in str(path):
        raise OSError(f"{str(path)!r} is not a file name")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise OSError(f"{path}: the home folder is not known: set HOME or another path") from error


def cache_folder() -> Path:
    """Return the folder for files that have no configured place. Raises OSError if the user has no
    home."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sage-sched"


def read_own(path: Path, max_bytes: int | None = None) -> bytes:
    """Return the file's content, or its first max_bytes. Raises OSError unless it is this user's
    own file, and no link: another user who can write it could forge its content."""
    with open(path, "rb", opener=_open_own) as file:
        return file.read(max_bytes)


def replace_own(path: Path, content: bytes) -> None:
    """Replace a file, or a link, as a whole. Only its user can read it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # mode 0600
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def own_file(path: str, flags: int) -> int:
    """Open a file for open(): only the owner may read a new file, and no link is followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _open_own(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a pipe would wait for ever.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(f"{path} is not a file of this user")
    return fd
