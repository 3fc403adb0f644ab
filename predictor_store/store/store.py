"""Stores answered prompts on disk: a folder with one database, written by one process at a time.

If store.on_disk is false, records are only in memory; the folder is read and not changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from predictor_store.cached_file import cache_folder, expanded
from predictor_store.store import file, lock
from predictor_store.store.file import NoRoomError, Record, StoreError
from sage_sched.app.config import StoreConfig

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 10.0
# The maximum number of unwritten records, 3.1 KB each. While the disk stays full, further records
# are lost.
_MAX_UNWRITTEN = 2_000


def default_path() -> Path:
    return cache_folder() / "store"


def folder_of(config: StoreConfig) -> Path:
    return expanded(config.path) if config.path else default_path()


def file_of(folder: Path) -> Path:
    """Return the store's file. If it is a link, return the target, beside which SQLite keeps its
    log."""
    return Path(os.path.realpath(folder / "history.sqlite3"))


def has_store(folder: Path) -> bool:
    """Whether the folder has a store. Raises StoreError if this user may not know."""
    try:
        return file_of(folder).exists()
    except OSError as error:
        raise file.explained(file_of(folder), error) from error


def recorded_capacity(folder: Path) -> int | None:
    """Return the capacity with which the store in folder was last opened; None if there is none.
    Raises StoreError."""
    if not has_store(folder):
        return None
    with contextlib.closing(file.connect_to_read(file_of(folder))) as connection:
        return int(file.read_meta(connection)["capacity"])


class Store:
    """Keeps at most config.capacity records. When it is full, the oldest warm ones are dropped
    first, then the oldest.

    Opening raises StoreError if the folder is in use, damaged, or made with another embedder.
    Writing never raises. If the disk is full, even when the store is opened, records are kept and
    counted, and writing is tried again later. If the file is replaced, later records are written to
    the file in its place. If it is removed, they are written to a new one.
    """

    def __init__(self, config: StoreConfig, embedder: str, dimension: int) -> None:
        """Open the store. embedder: the fingerprint of the embedder that makes the vectors."""
        self.folder = folder_of(config)
        self._path = file_of(self.folder)
        self._config = config
        self._made_with = {"embedder": embedder, "dimension": str(dimension)}
        self._unwritten: deque[Record] = deque()
        self._retry_at = 0.0
        self.num_lost = 0
        self.num_records = 0
        self.write_error: str | None = None
        self._lock_fd: int | None = None
        # The identity of the file that records are written to; None if there is none at present.
        self._file: tuple[int, int] | None = None
        try:
            self._open(on_disk=config.on_disk)
        except NoRoomError as error:
            self._open(on_disk=False)
            self._tell(error)

    def _open(self, *, on_disk: bool) -> None:
        """Open the file, or a copy in memory unless on_disk. If it raises StoreError, nothing is
        open."""
        path, meta = self._path, self._made_with | {"capacity": str(self._config.capacity)}
        with contextlib.ExitStack() as undo:
            try:
                if on_disk:
                    self._lock_fd = _make_and_lock(self.folder)
                    undo.callback(self._unlock)
                    if not path.exists():
                        file.create(path, meta)
                    self._connection = file.connect(path)
                else:
                    self._connection = file.in_memory(path, meta)
                undo.callback(self._connection.close)
                self._prepare()
            except (OSError, sqlite3.Error) as error:
                raise file.explained(path, error) from error
            self._file = _identity(path) if on_disk else None
            undo.pop_all()

    def _prepare(self) -> None:
        connection, capacity = self._connection, self._config.capacity
        meta = file.read_meta(connection)
        _require_same_embedder(meta, self._made_with, self.folder)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        ids = connection.execute("SELECT count(*), coalesce(max(id), 0) FROM records")
        self.num_records, self._last_id = ids.fetchone()
        with connection:
            _note(connection, "capacity", str(capacity))
            _evict(connection, self.num_records - capacity)
        self._opening = before = meta.get(file.OPENING, "")
        if _merge_log(connection):  # otherwise the rest of the log would count as another file's
            self._opening = secrets.token_hex(8)
            with connection:
                _note(connection, file.OPENING, self._opening)
            if not _merge_log(connection):
                self._opening = before
                with connection:
                    _note(connection, file.OPENING, before)
        self.num_records = min(self.num_records, capacity)

    def load(self) -> Iterator[Record]:
        """Yield all written records, oldest first. Raises StoreError at a damaged one."""
        return file.read_records(self._connection, self._path)

    def add(self, record: Record) -> None:
        """Add a record. The next flush writes it."""
        self._unwritten.append(record)
        if len(self._unwritten) > _MAX_UNWRITTEN:
            self._unwritten.popleft()
            self.num_lost += 1

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    def flush(self, *, now: bool = False) -> None:
        """Commit the added records. After a failure, this does nothing for some seconds, unless
        now is true."""
        if not self._unwritten or (time.monotonic() < self._retry_at and not now):
            return
        try:
            self._follow()
            self._commit()
        except (StoreError, sqlite3.Error) as error:
            self._tell(error)
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            return
        if self.write_error is not None:
            logger.warning("the store %s can be written again", self.folder)
        self.write_error = None

    def _tell(self, error: StoreError | sqlite3.Error) -> None:
        if isinstance(error, sqlite3.Error):
            error = file.explained(self._path, error)
        if self.write_error is None:
            logger.error(
                "%s; the history is kept in memory, and writing is tried again every %.0f s",
                error, _RETRY_SECONDS,
            )  # fmt: skip
        self.write_error = str(error)

    def _follow(self) -> None:
        """Open the file again if another one has replaced it. Raises StoreError."""
        is_there = self._file is not None and self._file == _identity(self._path)
        if is_there or not self._config.on_disk:
            return
        if self._file is not None:
            logger.warning("the store %s was removed or replaced: it is opened again", self.folder)
        self._file = None
        self._connection.close()
        self._unlock()
        self._open(on_disk=True)

    def note(self, key: str, value: str) -> None:
        """Write a note for `sage-sched store info`. It is lost if the disk cannot take it."""
        with contextlib.suppress(sqlite3.Error), self._connection:
            _note(self._connection, key, value)

    def _commit(self) -> None:
        rows = [file.to_row(self._last_id + i, of) for i, of in enumerate(self._unwritten, 1)]
        excess = self.num_records + len(rows) - self._config.capacity
        with self._connection:
            _note(self._connection, file.OPENING, self._opening)
            self._connection.executemany(
                "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows
            )
            _evict(self._connection, excess)
        self.num_records += len(rows) - max(excess, 0)
        self._last_id += len(rows)
        self._unwritten.clear()

    def close(self) -> None:
        """Write the remaining records and release the lock for other processes."""
        self.flush(now=True)
        self.num_lost += len(self._unwritten)
        self._unwritten.clear()
        self._connection.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_in_use(config: StoreConfig, patience_s: float = 5.0) -> None:
    """Raise StoreError if another process has the store and keeps it for patience_s. A server that
    is just ending releases it sooner."""
    folder = folder_of(config)
    deadline_s = time.monotonic() + patience_s
    while config.on_disk and lock.holder(folder) is not None:
        if time.monotonic() > deadline_s:
            raise StoreError(_in_use(folder))
        time.sleep(0.1)


def _in_use(folder: Path) -> str:
    return (
        f"the store {folder} is in use by process {lock.holder(folder)}: stop it, or give this "
        "one another folder (store.path, or --store)"
    )


def _make_and_lock(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = lock.acquire(folder)
    except OSError as error:
        raise file.explained(file_of(folder), error) from error
    if fd is None:
        raise StoreError(_in_use(folder))
    return fd


def _require_same_embedder(meta: dict[str, str], wanted: dict[str, str], folder: Path) -> None:
    made_with = [f"{m.get('embedder')} ({m.get('dimension')} dimensions)" for m in (meta, wanted)]
    if made_with[0] != made_with[1]:
        raise StoreError(
            f"the store {folder} was made with the embedder {made_with[0]}, but this server uses "
            f"{made_with[1]}: set predictor.encoder to that one, set store.path to another folder, "
            f"or move it away and warm a new one with `sage-sched warm ... --store {folder}`"
        )


def _note(connection: sqlite3.Connection, key: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _merge_log(connection: sqlite3.Connection) -> bool:
    """Write the write-ahead log into the file. Return False if another process prevents this by
    reading both."""
    is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not is_busy


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the file's device and inode; None if there is no file."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _evict(connection: sqlite3.Connection, num_records: int) -> None:
    if num_records > 0:
        connection.execute(
            "DELETE FROM records WHERE id IN"
            " (SELECT id FROM records ORDER BY origin = 'history', id LIMIT ?)",
            (num_records,),
        )
