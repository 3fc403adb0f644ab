"""Locks a folder, so that it has one writer. The kernel drops the lock when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path


def acquire(folder: Path) -> int | None:
    """Return the descriptor that holds the folder's lock until it is closed; None if another
    process has the lock.

    Raises OSError if the disk is full, or if the lock file is a link, whose target must not be
    written to.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        # holder() locks for a moment too, to test whether another process has it.
        for _ in range(10):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode("ascii"), 0)
                undo.pop_all()
                return fd
    return None


def holder(folder: Path) -> str | None:
    """Return the process id of the lock's holder; None if there is none, or if this user may not
    read it."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        # No file, a link (never ours), or another user's file.
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES):
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode("ascii", "replace") or "unknown"
    finally:
        os.close(fd)
