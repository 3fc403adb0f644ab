from __future__ import annotations

import ast
import contextlib
import logging
import os
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor_store.data.store_info import facts
from predictor_store.predict.embedder import dimension
from predictor_store.predict.history import History
from predictor_store.store import file, lock
from predictor_store.store.file import Record, StoreError
from predictor_store.store.store import Store, default_path, file_of, recorded_capacity
from sage_sched.app.config import StoreConfig
from tests.predictor_store.samples import record

DIMENSION = dimension()
EMBEDDER = "some model"


def opened(folder: Path, capacity: int = 100, embedder: str = EMBEDDER) -> Store:
    return Store(StoreConfig(str(folder), capacity), embedder, DIMENSION)


def in_memory(folder: Path, embedder: str = EMBEDDER) -> Store:
    return Store(StoreConfig(str(folder), on_disk=False), embedder, DIMENSION)


def filled(folder: Path, *records: Record) -> None:
    with opened(folder) as store:
        for one in records:
            store.add(one)


def add(store: Store, *seeds: int) -> None:
    """Add these records, and write each at once."""
    for seed in seeds:
        store.add(record(seed))
        store.flush(now=True)


def read(folder: Path, capacity: int = 100) -> list[Record]:
    with opened(folder, capacity) as store:
        return store.load()


def seeds(records: list[Record]) -> list[int]:
    return [record.output_tokens - 10 for record in records]


def executed(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def assert_same(left: list[Record], right: list[Record]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.vector, b.vector)
        assert (a.output_tokens, a.input_tokens, a.censored, a.origin) == (
            b.output_tokens, b.input_tokens, b.censored, b.origin,
        )  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "store"
    records = [record(1), record(2, censored=True, origin="warm"), record(3, input_tokens=0)]
    filled(folder, *records, record(4, scope="my adapter \ud800"))
    *found, of_adapter = read(folder)
    assert_same(found, records)
    assert of_adapter.scope == "my adapter ?"


def test_a_prompt_that_an_earlier_release_kept_is_passed_over(tmp_path: Path) -> None:
    filled(tmp_path, record(1))
    with sqlite3.connect(file_of(tmp_path)) as store:
        number, *fields, _, _ = store.execute("SELECT * FROM records").fetchone()
        crc32 = file._crc32(number, *fields, "its prompt")
        store.execute("UPDATE records SET prompt = 'its prompt', crc32 = ?", (crc32,))
    assert_same(read(tmp_path), [record(1)])


def test_other_users_may_not_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        add(store, 1)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert "history.sqlite3-wal" in modes
    assert set(modes.values()) == {0o600}


def test_what_a_link_points_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(StoreError, match="cannot open the store"):
        opened(tmp_path)
    assert lock.holder(tmp_path) is None
    assert (tmp_path / "theirs").read_text() == "precious"


def test_default_path_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_path() == tmp_path / ".cache" / "sage-sched" / "store"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_path() == Path("/cache/sage-sched/store")
    with Store(StoreConfig("~/mine"), EMBEDDER, DIMENSION) as store:
        assert store.folder == tmp_path / "mine"


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
    on_disk = read(folder, capacity)
    assert [r.output_tokens for r in on_disk] == sorted(history.lengths[: len(history)])
    by_eviction = sorted(on_disk, key=lambda r: (r.origin == "history", r.output_tokens))
    assert seeds(read(folder, smaller)) == sorted(seeds(by_eviction[-smaller:]))


def test_a_second_writer_is_told_who_has_it(tmp_path: Path) -> None:
    with opened(tmp_path):
        assert lock.holder(tmp_path) == str(os.getpid())
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            opened(tmp_path)
    assert lock.holder(tmp_path) is None
    opened(tmp_path).close()


@pytest.mark.parametrize(("embedder", "dimension"), [("another", DIMENSION), (EMBEDDER, 768)])
def test_another_embedder_is_refused(tmp_path: Path, embedder: str, dimension: int) -> None:
    filled(tmp_path, record(1))
    for on_disk in (True, False):
        with pytest.raises(StoreError, match=rf"{EMBEDDER}.*{embedder} \({dimension}"):
            Store(StoreConfig(str(tmp_path), on_disk=on_disk), embedder, dimension)
    assert len(read(tmp_path)) == 1


def another_database(path: Path) -> None:
    path.unlink()
    executed(path, "CREATE TABLE records (id INTEGER)")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: executed(path, "PRAGMA user_version = 99"),
        another_database,
        lambda path: os.truncate(path, path.stat().st_size // 3),
        lambda path: os.truncate(path, path.stat().st_size - 100),
        lambda path: path.write_bytes(b"hello, world\n" * 1000),
        lambda path: path.write_bytes(b"SQLite format 3\x00" * 500),
        lambda path: path.write_bytes(b""),
    ],
)
def test_a_file_that_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    filled(tmp_path, *map(record, range(50)))
    spoil(file_of(tmp_path))
    content = file_of(tmp_path).read_bytes()
    with pytest.raises(StoreError, match=r"format 99|damaged|not a sage-sched store"):
        opened(tmp_path).load()
    assert file_of(tmp_path).read_bytes() == content


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_pipes_and_folders_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(file_of(tmp_path))
    for opens in (read, in_memory, facts):
        with pytest.raises(StoreError, match="is no file"):
            opens(tmp_path)
    (tmp_path / "lock").unlink()
    make(tmp_path / "lock")
    assert lock.holder(tmp_path) is None


def test_a_flipped_byte_anywhere_is_refused_or_harmless(tmp_path: Path) -> None:
    records = [record(i, origin="warm" if i % 3 else "history") for i in range(30)]
    filled(tmp_path / "good", *records)
    content = file_of(tmp_path / "good").read_bytes()
    rng = random.Random(0)
    num_refused = 0
    for trial in range(150):
        bad = bytearray(content)
        # SQLite's header and the schema are small: give them their share.
        bad[rng.randrange(8192 if trial % 3 == 0 else len(bad))] ^= 1 << rng.randrange(8)
        folder = tmp_path / str(trial)
        folder.mkdir()
        file_of(folder).write_bytes(bad)
        try:
            found = read(folder)
        except StoreError:
            num_refused += 1
        else:
            assert_same(found, records)
    assert num_refused > 50


@contextlib.contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_delays_writing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor_store.store.store._RETRY_SECONDS", 1e9)
    with opened(tmp_path) as store, caplog.at_level(logging.WARNING):
        add(store, 1)
        with no_file_larger_than(64 * 1024):
            add(store, *range(2, 60))
            assert store.write_error is not None
            num_unwritten = store.num_unwritten
            assert 0 < num_unwritten < 59
            assert len(caplog.records) == 1
        store.flush()  # Not due yet.
        assert store.num_unwritten == num_unwritten
        store.flush(now=True)
        assert (store.num_unwritten, store.num_lost, store.write_error) == (0, 0, None)
        assert len(caplog.records) == 2
    assert seeds(read(tmp_path)) == [*range(1, 60)]


def test_a_full_disk_costs_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predictor_store.store.store._MAX_UNWRITTEN", 10)
    filled(tmp_path, record(1))
    store = opened(tmp_path)
    with no_file_larger_than(1024):
        add(store, *range(2, 22))
        assert (store.num_unwritten, store.num_lost) == (10, 10)
        store.close()
    assert store.num_lost == 20
    assert seeds(read(tmp_path)) == [1]


@pytest.mark.parametrize("room_bytes", [0, 1024])
@pytest.mark.parametrize(("num_before", "capacity"), [(0, 100), (30, 20)])
def test_a_disk_that_is_full_at_the_start_delays_writing_alone(
    tmp_path: Path, num_before: int, capacity: int, room_bytes: int
) -> None:
    if num_before:
        filled(tmp_path, *map(record, range(num_before)))
    with no_file_larger_than(room_bytes):
        store = opened(tmp_path, capacity)
        assert seeds(store.load()) == list(range(num_before))[-capacity:]
        add(store, 50)
        assert (store.num_unwritten, store.num_lost) == (1, 0)
    store.flush(now=True)
    assert (store.num_unwritten, store.write_error) == (0, None)
    store.close()
    assert seeds(read(tmp_path, capacity)) == [*range(num_before), 50][-capacity:]


def test_where_nothing_is_to_be_on_disk_nothing_is(tmp_path: Path) -> None:
    with in_memory(tmp_path / "none") as store:
        add(store, 0, 1)
        assert seeds(store.load()) == [0, 1]
    assert not (tmp_path / "none").exists()


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_store_that_is_only_read_has_many_readers_and_stays(tmp_path: Path) -> None:
    filled(tmp_path, *map(record, range(3)))
    before = tree(tmp_path)
    with in_memory(tmp_path) as one, in_memory(tmp_path) as other:
        add(one, 3)
        assert one.write_error is None
        assert (seeds(one.load()), seeds(other.load())) == ([0, 1, 2, 3], [0, 1, 2])
    assert tree(tmp_path) == before


KILLED = """
import os, sys
from pathlib import Path
from tests.predictor_store.store.test_store import add, opened
add(opened(Path(sys.argv[1]), 10_000, sys.argv[2]), *map(int, sys.argv[3:]))
os.kill(os.getpid(), 9)
"""


def killed(folder: Path, *seeds: int, embedder: str = EMBEDDER) -> None:
    """A server that has added these is killed: its write-ahead log is left."""
    command = [sys.executable, "-c", KILLED, str(folder), embedder, *map(str, seeds)]
    subprocess.run(command, check=False)
    assert file_of(folder).with_name("history.sqlite3-wal").stat().st_size > 0


@pytest.mark.parametrize("num", [3, 300])
@pytest.mark.parametrize("embedder", [EMBEDDER, "another"])
def test_a_file_that_is_moved_away_is_forgotten(tmp_path: Path, num: int, embedder: str) -> None:
    killed(tmp_path, *range(num))
    file_of(tmp_path).unlink()
    for num_before in range(3):
        with opened(tmp_path, embedder=embedder) as store:
            assert seeds(store.load()) == list(range(num_before))
            add(store, num_before)


@pytest.mark.parametrize("reads", [read, lambda folder: in_memory(folder).load()])
@pytest.mark.parametrize(
    ("embedder", "is_old"), [(EMBEDDER, False), (EMBEDDER, True), ("another", False)]
)
def test_a_restored_file_is_not_mixed_with_the_log_that_lies_there(
    tmp_path: Path, embedder: str, is_old: bool, reads: Callable[[Path], list[Record]]
) -> None:
    folder, kept = tmp_path / "store", tmp_path / "kept"
    filled(kept, *map(record, range(50)))
    if is_old:  # earlier releases did not number openings
        executed(file_of(kept), "DELETE FROM meta WHERE key = 'opening'")
    if embedder == EMBEDDER:
        shutil.copytree(kept, folder)
    killed(folder, *range(50, 60), embedder=embedder)
    shutil.copy(file_of(kept), file_of(folder))
    assert seeds(reads(folder)) == list(range(50))


def test_a_log_is_kept_though_somebody_read_while_its_server_started(tmp_path: Path) -> None:
    filled(tmp_path, record(0))
    killed(tmp_path, 1)
    with contextlib.closing(file.connect_to_read(file_of(tmp_path))) as reader:
        reader.execute("BEGIN").execute("SELECT count(*) FROM records").fetchone()
        killed(tmp_path, 2)
    assert seeds(read(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize("left", [[], ["-shm"], ["-shm", "-wal"]])
def test_reading_changes_nothing_though_a_log_is_there(tmp_path: Path, left: list[str]) -> None:
    killed(tmp_path, *range(5))
    for end in left:
        file_of(tmp_path).with_name(f"history.sqlite3{end}").unlink()
    before = tree(tmp_path)
    for _ in range(2):
        with in_memory(tmp_path) as store:
            assert len(store.load()) == (0 if "-wal" in left else 5)
        assert recorded_capacity(tmp_path) == facts(tmp_path)["capacity"] == 10_000
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
    assert seeds(read(real)) == seeds(read(folder)) == [6]


def by_one_without_privileges(does: Callable[[], object]) -> object:
    """The result or error of a call in a process without privileges."""
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
    ("folder_mode", "file_mode", "can_read"),
    [(0o555, 0o444, True), (0o555, 0o000, False), (0o000, 0o444, False)],
)
def test_a_read_only_store_is_read(folder_mode: int, file_mode: int, can_read: bool) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        filled(folder, *map(record, range(3)))
        for path, mode in ((file_of(folder), file_mode), (folder, folder_mode), (parent, 0o755)):
            os.chmod(path, mode)
        reads = (lambda: len(in_memory(folder).load()), lambda: facts(folder)["num_records"])
        for does in reads:
            found = by_one_without_privileges(does)
            assert found == 3 if can_read else "ermission" in str(found)
        assert "ermission" in str(by_one_without_privileges(lambda: opened(folder).load()))
        folder.chmod(0o700)


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
    assert seeds(read(folder)) == [*kept, 8, 9]


def test_a_store_that_another_server_has_made_anew_is_left_to_it(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        shutil.rmtree(tmp_path / "store")
        with opened(tmp_path / "store") as theirs:
            add(store, 1)
            add(theirs, 2)
        assert store.num_unwritten == 1
        store.flush(now=True)
    assert seeds(read(tmp_path / "store")) == [2, 1]
