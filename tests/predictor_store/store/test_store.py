from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor_store.data.store_info import facts
from predictor_store.predict.embedder import dimension
from predictor_store.predict.history import History
from predictor_store.store import file, lock
from predictor_store.store.file import AccessError, NoRoomError, Record, StoreError
from predictor_store.store.store import Store, file_of, recorded_capacity, refuse_in_use
from sage_sched.app.config import StoreConfig
from tests.predictor_store.samples import no_file_larger_than, record

DIMENSION = dimension()
EMBEDDER = "some model"


def opened(folder: Path, capacity: int = 100, embedder: str = EMBEDDER) -> Store:
    return Store(StoreConfig(str(folder), capacity), embedder, DIMENSION)


def in_memory(folder: Path, embedder: str = EMBEDDER, dimension: int = DIMENSION) -> Store:
    return Store(StoreConfig(str(folder), on_disk=False), embedder, dimension)


def add(store: Store, *seeds: int) -> None:
    """Add these records, writing each at once."""
    for seed in seeds:
        store.add(record(seed))
        store.flush(now=True)


def filled(folder: Path, *records: Record) -> None:
    with opened(folder) as store:
        for one in records:
            store.add(one)


def seeds(store: Store) -> list[int]:
    return [record.output_tokens - 10 for record in store.load()]


def seeds_in(folder: Path, capacity: int = 100) -> list[int]:
    with opened(folder, capacity) as store:
        return seeds(store)


def fields(records: list[Record]) -> list[tuple[object, ...]]:
    return [(one.vector.tobytes(), *astuple(one)[1:]) for one in records]


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def executed(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_written_records_are_read_by_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "store"
    records = [record(1), record(2, censored=True, origin="warm"), record(3, input_tokens=0)]
    with opened(folder) as store:
        for one in (*records, record(4, scope="my adapter \ud800")):
            store.add(one)
        store.flush()
        assert fields([*store.load()]) == fields([*records, record(4, scope="my adapter ?")])
        # NORMAL: a write-ahead log is flushed to disk before it is merged.
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (1,)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = "history.sqlite3", "history.sqlite3-wal", "history.sqlite3-shm", "lock"
    assert modes == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_stores_of_an_earlier_release_are_read(tmp_path: Path) -> None:
    filled(tmp_path)
    values = f"1, zeroblob({4 * DIMENSION}), 11, 5, 0, 'history', 'lora', 'its prompt', 3387136159"
    executed(file_of(tmp_path), f"INSERT INTO records VALUES ({values})")
    assert seeds_in(tmp_path) == [1]


@settings(max_examples=25)
@given(
    batches=st.lists(st.lists(st.booleans(), max_size=8), max_size=6),
    capacity=st.integers(1, 12),
    smaller=st.integers(1, 12),
)
def test_disk_and_memory_keep_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[bool]], capacity: int, smaller: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    history = History(DIMENSION, 0, capacity)
    seed = 0
    with opened(folder, capacity) as store:
        for batch in batches:
            for warm in batch:
                seed += 1
                one = record(seed, origin="warm" if warm else "history")
                store.add(one)
                history.add(one)
            store.flush()
            assert store.num_records == len(history)
    with opened(folder, capacity) as store:
        on_disk = [*store.load()]
    assert [r.output_tokens for r in on_disk] == sorted(history.lengths[: len(history)])
    by_eviction = sorted(on_disk, key=lambda r: (r.origin == "history", r.output_tokens))
    left = sorted(r.output_tokens - 10 for r in by_eviction[-smaller:])
    with opened(folder, smaller) as store:
        assert (seeds(store), store.num_records) == (left, len(left))


def test_a_second_writer_is_told_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").write_text("the longer number of an earlier process")
    with opened(tmp_path):
        assert lock.holder(tmp_path) == str(os.getpid())
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}:"):
            opened(tmp_path)
    assert lock.holder(tmp_path) is None
    # A process that asks for the holder also has the lock for a moment.
    with open(tmp_path / "lock") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda seconds: asking.close())
        opened(tmp_path).close()
    with open(tmp_path / "lock") as ending:
        fcntl.flock(ending, fcntl.LOCK_EX)
        refuse_in_use(StoreConfig(str(tmp_path), on_disk=False))
        monkeypatch.setattr(time, "sleep", lambda seconds: ending.close())
        with pytest.raises(StoreError, match="in use by process"):
            refuse_in_use(StoreConfig(str(tmp_path)), -1)
        refuse_in_use(StoreConfig(str(tmp_path)), 60)


def another_database(path: Path) -> None:
    path.unlink()
    executed(path, "CREATE TABLE records (id INTEGER)")


VALUES = {
    "id": 99, "vector": "'text'", "output_tokens": 1, "input_tokens": 1, "censored": 1,
    "origin": "'warm'", "scope": "CAST(x'ff' AS TEXT)", "prompt": "'x'", "crc32": 1,
}  # fmt: skip
SPOILT: list[tuple[str | Callable[[Path], object], str]] = [
    *(
        (f"UPDATE records SET {of} = {value} WHERE id = 9", "damaged")
        for of, value in VALUES.items()
    ),
    ("PRAGMA user_version = 99", "format 99"),
    ("DELETE FROM meta WHERE key = 'embedder'", "damaged"),
    ("UPDATE meta SET value = 'many' WHERE key = 'capacity'", "damaged"),
    ("UPDATE meta SET value = 'another' WHERE key = 'embedder'", f"another .*{EMBEDDER}"),
    ("UPDATE meta SET value = 3 WHERE key = 'dimension'", rf"\(3 dim.*\({DIMENSION} dim"),
    (another_database, "not a sage-sched store"),
    (lambda path: os.truncate(path, path.stat().st_size // 3), "damaged"),
    (lambda path: os.truncate(path, path.stat().st_size - 100), "damaged"),
    (lambda path: path.write_bytes(b"hello, world\n" * 1000), "damaged"),
    (lambda path: path.write_bytes(b""), "not a sage-sched store"),
]


def test_a_spoilt_or_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path / "good", *map(record, range(50)))
    for number, (spoil, said) in enumerate(SPOILT):
        shutil.copytree(tmp_path / "good", folder := tmp_path / str(number))
        path = file_of(folder)
        executed(path, spoil) if isinstance(spoil, str) else spoil(path)
        before = path.read_bytes()
        for opens in (opened, in_memory):
            with pytest.raises(StoreError, match=said):
                [*opens(folder).load()]
        # Records are checked after opening, and opening changes the store's file.
        assert path.read_bytes() == before or "UPDATE records" in str(spoil)


KINDS: dict[type[StoreError], str] = {
    NoRoomError: "FULL IOERR_WRITE IOERR_FSYNC IOERR_SHMSIZE IOERR_TRUNCATE ENOSPC EDQUOT EFBIG",
    AccessError: "READONLY_DIRECTORY BUSY_SNAPSHOT LOCKED CANTOPEN PERM AUTH NOMEM EIO",
    StoreError: "CORRUPT_INDEX IOERR_READ NOTADB",
}


def test_errors_say_whether_the_file_may_be_sound() -> None:
    for kind, names in KINDS.items():
        for name in names.split():
            error: Any = sqlite3.Error()
            error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{name}", None)
            if hasattr(errno, name):
                error = OSError(getattr(errno, name), "")
            assert type(file.explained(Path(), error)) is kind, name


def linked(path: Path) -> None:
    path.symlink_to(path.with_name("theirs"))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, linked])
def test_pipes_folders_and_links_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "lock")
    with pytest.raises(StoreError, match="cannot open the store"):
        opened(tmp_path)
    assert lock.holder(tmp_path) is None
    assert not (tmp_path / "theirs").exists()
    if make is not linked:  # the store's file may be a link
        (folder := tmp_path / "store").mkdir()
        make(file_of(folder))
        for opens in (opened, in_memory, facts):
            with pytest.raises(StoreError, match="is not a file"):
                opens(folder)


def test_a_full_disk_delays_writing_and_costs_the_oldest_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1e6]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("predictor_store.store.store.time", clock)
    monkeypatch.setattr("predictor_store.store.store._MAX_UNWRITTEN", 10)
    with opened(tmp_path) as store, caplog.at_level(logging.WARNING):
        with no_file_larger_than(64 * 1024):
            add(store, *range(60))
            assert store.write_error is not None
            assert (store.num_unwritten, len(caplog.records)) == (10, 1)
        for now_s[0] in (1e6 + 9, 1e6 + 11):
            assert store.num_unwritten == 10
            store.flush()  # acts only after 10 s
        assert (store.num_unwritten, store.write_error, len(caplog.records)) == (0, None, 2)
        num_written = 50 - store.num_lost
        assert 0 < num_written < 50
    assert seeds_in(tmp_path) == [*range(num_written), *range(50, 60)]
    with opened(tmp_path) as store, no_file_larger_than(1024):
        add(store, 60)
        store.note("quality", "{}")  # this record is lost without an error
        store.close()
    assert store.num_lost == 1


@pytest.mark.parametrize("room_bytes", [0, 1024])
@pytest.mark.parametrize(("num_before", "capacity"), [(0, 100), (30, 20)])
def test_a_disk_that_is_full_at_the_start_delays_writing_alone(
    tmp_path: Path, num_before: int, capacity: int, room_bytes: int
) -> None:
    if num_before:
        filled(tmp_path, *map(record, range(num_before)))
    with no_file_larger_than(room_bytes):
        store = opened(tmp_path, capacity)
        assert seeds(store) == list(range(num_before))[-capacity:]
        add(store, 50)
        assert (store.num_unwritten, store.num_lost) == (1, 0)
    store.flush(now=True)
    assert (store.num_unwritten, store.write_error) == (0, None)
    store.close()
    assert seeds_in(tmp_path, capacity) == [*range(num_before), 50][-capacity:]


KILLED = """
import os, sys
from pathlib import Path
from tests.predictor_store.store.test_store import add, opened
add(opened(Path(sys.argv[1]), 10_000, sys.argv[2]), *map(int, sys.argv[3:]))
os.kill(os.getpid(), 9)
"""


def killed(folder: Path, *seeds: int, embedder: str = EMBEDDER) -> None:
    """A server that has added these is killed. Its write-ahead log remains."""
    command = [sys.executable, "-c", KILLED, str(folder), embedder, *map(str, seeds)]
    subprocess.run(command, check=False)
    assert file_of(folder).with_name("history.sqlite3-wal").stat().st_size > 0


@pytest.mark.parametrize("reads", [opened, in_memory])
@pytest.mark.parametrize(
    ("num_kept", "num_in_log", "embedder", "is_old"),
    [
        (0, 3, EMBEDDER, False), (0, 300, EMBEDDER, False), (0, 3, "another", False),
        (50, 10, EMBEDDER, False), (50, 10, EMBEDDER, True), (50, 10, "another", False),
    ],
)  # fmt: skip
def test_a_file_is_not_mixed_with_a_log_that_another_has_left(
    tmp_path: Path, num_kept: int, num_in_log: int, embedder: str, is_old: bool,
    reads: Callable[[Path], Store],
) -> None:  # fmt: skip
    folder, kept = tmp_path / "store", tmp_path / "kept"
    filled(kept, *map(record, range(num_kept)))
    if is_old:  # earlier releases did not number openings
        executed(file_of(kept), "DELETE FROM meta WHERE key = 'opening'")
    if num_kept and embedder == EMBEDDER:
        shutil.copytree(kept, folder)
    killed(folder, *range(50, 50 + num_in_log), embedder=embedder)
    file_of(folder).unlink()
    if num_kept:
        shutil.copy(file_of(kept), file_of(folder))
    with reads(folder) as store:
        assert seeds(store) == list(range(num_kept))
    for num in (num_kept, num_kept + 1):
        with opened(folder) as store:
            assert seeds(store) == list(range(num))
            add(store, num)


@pytest.mark.slow
def test_a_log_is_kept_if_a_reader_was_there_at_the_start(tmp_path: Path) -> None:
    filled(tmp_path, record(0))
    killed(tmp_path, 1)
    with contextlib.closing(file.connect_to_read(file_of(tmp_path))) as reader:
        reader.execute("BEGIN").execute("SELECT count(*) FROM records").fetchone()
        killed(tmp_path, 2)
    assert seeds_in(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("without", "num_known"),
    [((), 5), (("-shm",), 5), (("-shm", "-wal"), 0), (("-shm", "-wal", ""), 0)],
)
def test_stores_in_memory_change_nothing_on_disk(
    tmp_path: Path, without: tuple[str, ...], num_known: int
) -> None:
    killed(tmp_path, *range(5))
    for end in without:
        file_of(tmp_path).with_name(f"history.sqlite3{end}").unlink()
    before = tree(tmp_path)
    with in_memory(tmp_path) as one, in_memory(tmp_path) as other:
        add(one, num_known)
        known = [*range(num_known)]
        assert (seeds(one), one.write_error, seeds(other)) == ([*known, num_known], None, known)
    assert recorded_capacity(tmp_path) == (None if "" in without else 10_000)
    assert tree(tmp_path) == before


def test_a_file_that_is_a_link_has_its_log_where_it_points_to(tmp_path: Path) -> None:
    real, folder = tmp_path / "real", tmp_path / "store"
    folder.mkdir()
    (folder / "history.sqlite3").symlink_to(real / "history.sqlite3")
    killed(real, *range(5))
    assert [facts(read_by)["num_records"] for read_by in (folder, real)] == [5, 5]
    killed(folder, 5)
    file_of(real).unlink()
    filled(folder, record(6))
    assert seeds_in(real) == seeds_in(folder) == [6]


def by_one_without_privileges(does: Callable[[], object]) -> object:
    """Return the result or error of a call in a process without privileges."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            said: object = does()
        except StoreError as error:
            said = str(error)
        os.write(writing, repr(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading) as piped:
        return ast.literal_eval(piped.read())


@pytest.mark.parametrize(
    ("folder_mode", "file_mode", "log_mode", "can_read"),
    [
        (0o555, 0o444, None, True),
        (0o555, 0o000, None, False),
        (0o000, 0o444, None, False),
        (0o777, 0o666, 0o000, False),
    ],
)
def test_a_store_of_another_user_is_read_and_left_alone(
    folder_mode: int, file_mode: int, log_mode: int | None, can_read: bool
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        if log_mode is None:
            filled(folder, record(0))
        else:
            killed(folder, 0)
            file_of(folder).with_name("history.sqlite3-wal").chmod(log_mode)
            (folder / "lock").chmod(0o666)
        for path, mode in ((file_of(folder), file_mode), (folder, folder_mode), (parent, 0o755)):
            os.chmod(path, mode)
        refused = r"ermission|unable to open"
        for does in (lambda: seeds(in_memory(folder)), lambda: facts(folder)["num_records"]):
            found = by_one_without_privileges(does)
            assert found in ([0], 1) if can_read else re.search(refused, str(found))
        found = by_one_without_privileges(lambda: [*opened(folder).load()])
        assert re.search(refused, str(found))
        folder.chmod(0o700)
        assert seeds_in(folder) == [0]


def restored(folder: Path) -> None:
    other = folder.with_name("other")
    filled(other, record(7))
    file_of(other).replace(file_of(folder))


@pytest.mark.parametrize(
    ("befalls", "kept"),
    [
        (shutil.rmtree, []),
        (lambda folder: folder.rename(folder.with_name("moved")), []),
        (lambda folder: file_of(folder).unlink(), []),
        (restored, [7]),
    ],
)
def test_a_store_that_is_removed_or_replaced_while_it_is_open_is_opened_anew(
    tmp_path: Path, befalls: Callable[[Path], None], kept: list[int]
) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        add(store, 1)
        befalls(folder)
        add(store, 8, 9)
        assert (store.num_unwritten, store.num_records) == (0, len(kept) + 2)
        assert lock.holder(folder) == str(os.getpid())
    assert seeds_in(folder) == [*kept, 8, 9]


def test_a_store_that_another_server_has_made_anew_is_left_to_it(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for path in tmp_path.iterdir():
            path.unlink()
        with opened(tmp_path) as theirs:
            add(store, 1)
            add(theirs, 2)
        assert store.num_unwritten == 1
        store.flush(now=True)
    assert seeds_in(tmp_path) == [2, 1]
