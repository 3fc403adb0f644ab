"""Reads and writes a store's file: an SQLite database with a row and a checksum per record."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from sage_sched.errors import UserError

logger = logging.getLogger(__name__)

APPLICATION_ID = 0x53414745  # "SAGE", in SQLite's header field for it
FORMAT_VERSION = 2

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    id INTEGER PRIMARY KEY,      -- age: the smaller, the older
    vector BLOB NOT NULL,        -- float32, little-endian
    output_tokens INTEGER NOT NULL,
    input_tokens INTEGER NOT NULL,
    censored INTEGER NOT NULL,
    origin TEXT NOT NULL,
    scope TEXT NOT NULL,
    prompt TEXT,                 -- earlier releases could keep it
    crc32 INTEGER NOT NULL
);
CREATE INDEX records_by_eviction ON records (origin = 'history', id);
"""


# A key of the table meta. Its value is a random number that a server draws when it opens the store,
# and writes then and with each commit. It distinguishes the file's own write-ahead log from a log
# that another file at the same path has left.
OPENING = "opening"

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_CODES = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE,
)  # fmt: skip
# The file may be sound, but this user cannot read or write it, at least not now.
_ACCESS_CODES = (
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
)  # fmt: skip


class StoreError(UserError):
    """The store cannot be used; the message says why and what to do."""


class AccessError(StoreError):
    """This user cannot read or write the file, at least not now. The file may be sound."""


class NoRoomError(AccessError):
    """The disk is full."""


# "history": recorded by this server; "warm": loaded from a dataset.
Origin = Literal["history", "warm"]


@dataclass(frozen=True, slots=True)
class Record:
    """One answered prompt.

    vector: float32, shape (dimension,), see predictor_store.predict.embedder.
    input_tokens: the length of the prompt; 0 if unknown.
    censored: whether the answer was cut off at output_tokens by its cap.
    scope: the kind of traffic that it belongs to, such as a LoRA adapter's name; "" for the base
        model.
    """

    vector: NDArray[np.float32]
    output_tokens: int
    input_tokens: int
    censored: bool
    origin: Origin
    scope: str = ""


def create(path: Path, meta: dict[str, str]) -> None:
    """Make a new file with no records. If the process is killed, the file is complete or absent.

    Leftovers of an earlier file are removed: SQLite would replay them into the new one.
    """
    unfinished = path.with_suffix(".new")
    for left in (unfinished, *_side_files(unfinished), *_side_files(path)):
        left.unlink(missing_ok=True)
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with contextlib.closing(sqlite3.connect(unfinished)) as connection:
        _make_tables(connection, meta)
    unfinished.replace(path)


def in_memory(path: Path, meta: dict[str, str]) -> sqlite3.Connection:
    """Return a copy of the file at path, or a store with no records if there is none. Nothing is
    written to disk. Raises StoreError as connect_to_read does."""
    # One thread loads it and another uses it, never both at once.
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    if path.exists():
        with contextlib.closing(connect_to_read(path)) as on_disk:
            on_disk.backup(connection)
    else:
        _make_tables(connection, meta)
    return connection


def _make_tables(connection: sqlite3.Connection, meta: dict[str, str]) -> None:
    connection.executescript(_SCHEMA)
    with connection:
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")


def connect(path: Path) -> sqlite3.Connection:
    """Connect to read and write. Raises StoreError unless the file at path is a sound store of this
    format. Another file's write-ahead log is removed."""
    if _has_foreign_log(path):
        logger.warning("%s was moved or restored: another file's log beside it is removed", path)
        for left in _side_files(path):
            left.unlink(missing_ok=True)
    return _open(path, "mode=rw", os.R_OK | os.W_OK)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Connect to read, as connect does, but change nothing on disk. A server may have the store
    open."""
    if not _has_log(path) or _has_foreign_log(path):
        return _open_without_log(path)
    return _open_with_log(path)


def _side_files(path: Path) -> list[Path]:
    """Return the files that SQLite keeps beside a database while it is open, and after its process
    was killed."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")]


def _has_log(path: Path) -> bool:
    log = _side_files(path)[0]
    return log.exists() and log.stat().st_size > 0


def _has_foreign_log(path: Path) -> bool:
    """Whether the file is sound, but has the log of another file, or a log that would damage it."""
    if not _has_log(path):
        return False
    try:
        with contextlib.closing(_open_without_log(path)) as alone:
            own = read_meta(alone).get(OPENING, "")
    except StoreError:  # it may need its log: its process was killed while it merged the log
        return False
    try:
        with contextlib.closing(_open_with_log(path)) as whole:
            return own != read_meta(whole).get(OPENING, "")
    except AccessError:
        raise
    except StoreError:
        return True


def _open_without_log(path: Path) -> sqlite3.Connection:
    return _open(path, "mode=ro&immutable=1", os.R_OK)


def _open_with_log(path: Path) -> sqlite3.Connection:
    log, index, _ = _side_files(path)
    if index.exists():
        return _open(path, "mode=ro&readonly_shm=1", os.R_OK)
    # SQLite would create the index beside the file, so it reads a copy.
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copy(path, folder))
            shutil.copy(log, folder)
            return _open(path, "mode=rw", os.R_OK, copy)
    except OSError as error:
        raise explained(path, error) from error


def _open(path: Path, how: str, access: int, copy: Path | None = None) -> sqlite3.Connection:
    if not os.access(path, access):  # SQLite would give no reason
        what = "read and write" if access & os.W_OK else "read"
        raise AccessError(f"this user has no permission to {what} the store {path}")
    if not path.is_file():  # SQLite would wait for a pipe, and call a folder damaged
        raise StoreError(f"{path} is not a file: move it away, or give another folder")
    uri = f"{(copy or path).as_uri()}?{how}"
    with contextlib.ExitStack() as undo:
        try:
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            undo.callback(connection.close)
            _check(connection, path)
        except sqlite3.Error as error:
            raise explained(path, error) from error
        undo.pop_all()
    return connection


def explained(path: Path, error: OSError | sqlite3.Error) -> StoreError:
    """Return a StoreError that explains an error of the system or SQLite."""
    code = getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_OK
    if getattr(error, "errno", None) in _FULL_ERRNOS or code in _FULL_CODES:
        return NoRoomError(f"cannot write the store {path}: {error}")
    if isinstance(error, OSError) or code & 0xFF in _ACCESS_CODES:
        return AccessError(f"cannot open the store {path}: {error}")
    return _damaged(path, error)


def _damaged(path: Path, what: object) -> StoreError:
    return StoreError(
        f"the store {path} is damaged: {what}. Move it away or restore a copy. Without the file "
        "a new store is made, which `sage-sched warm` can fill"
    )


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the table meta: the properties that the store was made with, and notes."""
    return dict(connection.execute("SELECT key, value FROM meta"))


def read_records(connection: sqlite3.Connection, path: Path) -> Iterator[Record]:
    """Yield the records, oldest first. Raises StoreError at the first damaged record."""
    dimension = int(read_meta(connection)["dimension"])
    try:
        rows = connection.execute(
            "SELECT id, vector, output_tokens, input_tokens, censored, origin, scope, prompt, crc32"
            " FROM records ORDER BY id"
        )
        for record_id, *fields, crc32 in rows:
            # In a damaged record each field may have any type, the vector too.
            vector, num_out, num_in, censored, origin, scope, _ = fields
            sound = isinstance(vector, bytes) and len(vector) == 4 * dimension
            if not sound or _crc32(record_id, *fields) != crc32:
                raise _damaged(path, f"record {record_id} does not match its checksum")
            numbers = np.frombuffer(vector, "<f4").astype(np.float32)
            made_by = cast(Origin, origin)
            yield Record(numbers, num_out, num_in, bool(censored), made_by, scope)
    except sqlite3.Error as error:
        raise explained(path, error) from error


def to_row(record_id: int, record: Record) -> tuple[object, ...]:
    fields = (
        record.vector.astype("<f4").tobytes(),
        record.output_tokens,
        record.input_tokens,
        int(record.censored),
        record.origin,
        # SQLite keeps text as UTF-8, which has no lone surrogates.
        record.scope.encode("utf-8", "replace").decode("utf-8"),
        None,
    )
    return (record_id, *fields, _crc32(record_id, *fields))


def _crc32(record_id: int, vector: bytes, *fields: object) -> int:
    rest = repr((record_id, *fields)).encode("utf-8")
    return zlib.crc32(rest, zlib.crc32(vector))


def _check(connection: sqlite3.Connection, path: Path) -> None:
    def pragma(name: str) -> object:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]

    if pragma("application_id") != APPLICATION_ID:
        raise StoreError(f"{path} is not a sage-sched store: give another folder or move it away")
    if (version := pragma("user_version")) != FORMAT_VERSION:
        raise StoreError(
            f"the store {path} has format {version}, this release reads {FORMAT_VERSION}: "
            "move it away and warm a new one with `sage-sched warm`, or set store.path"
        )
    if (soundness := pragma("integrity_check(1)")) != "ok":
        raise _damaged(path, soundness)
    meta = read_meta(connection)
    numbers = [meta.get("dimension", ""), meta.get("capacity", "")]
    if "embedder" not in meta or not all(number.isdecimal() for number in numbers):
        raise _damaged(path, "it does not name the embedder that it was made with")
