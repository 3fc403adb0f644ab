from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from predictor_store.logs import json_values, lines, server_lines
from predictor_store.logs.errors import DatasetError, RowError
from predictor_store.logs.rows import raw_rows

Rows = list[dict[str, Any]]
ROWS: Rows = [
    {"t": 1, "prompt": "a, ] [", "deep": {"x": [1, 2]}},
    {"t": 2, "prompt": '\\"]', "deep": {"x": []}},
]


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(content))


def parquet(rows: Rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def json_lines(rows: Rows) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def array(rows: Rows) -> bytes:
    return b"\n " + json.dumps(rows, indent=2).encode() + b"\n \n"


def pretty(rows: Rows) -> bytes:
    return "\n".join(json.dumps(row, indent=1) for row in rows).encode()


KINDS: dict[str, Callable[[Rows], bytes]] = {
    "json lines": json_lines,
    "with a mark of byte order, of Windows": lambda rows: (
        b"\xef\xbb\xbf" + json_lines(rows).replace(b"\n", b"\r\n")
    ),
    "array": array,
    "array in a line": lambda rows: json.dumps(rows).encode(),
    "objects over many lines": pretty,
    "gzip": lambda rows: gzip.compress(json_lines(rows)),
    "array in zstd": lambda rows: zstd(array(rows)),
    "parquet": parquet,
}


def read(folder: Path, content: bytes, name: str = "log") -> tuple[list[Any], list[str]]:
    """Return the good rows, and the errors of the others."""
    (folder / name).write_bytes(content)
    found = [row for _, row in raw_rows(str(folder / name))]
    good = [row for row in found if not isinstance(row, RowError)]
    return good, [str(row) for row in found if isinstance(row, RowError)]


@pytest.mark.parametrize("piece", [1, 7, 2**20])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_out_of_files_of_every_kind(
    tmp_path: Path, kind: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "_CHARS", piece)
    assert read(tmp_path, KINDS[kind](ROWS)) == (ROWS, [])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('t,"a, b"\n1,"x, y"\n', [{"t": "1", "a, b": "x, y"}]),
        ("t\ta\n1\tx\n", [{"t": "1", "a": "x"}]),
        ("t;a\n1;x\n\n2;y", [{"t": "1", "a": "x"}, {"t": "2", "a": "y"}]),
        ("t,a\r1,x\r2", [{"t": "1", "a": "x"}, {"t": "2"}]),
        ('t,a\n1,"x\ny"\n', [{"t": "1", "a": "x\ny"}]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_of_texts(
    tmp_path: Path, text: str, rows: list[dict[str, str]], encoding: str
) -> None:
    assert read(tmp_path, text.encode(encoding), "log.csv") == (rows, [])
    places = [place.rpartition(": ")[2] for place, _ in raw_rows(str(tmp_path / "log.csv"))]
    assert places == [f"row {number}" for number in range(2, 2 + len(rows))]


@pytest.mark.parametrize(
    ("text", "num_good", "num_wrong"),
    [
        ("", 0, 0), ("\n \n", 0, 0), (" [ \n] ", 0, 0), ("{}", 1, 0),
        ('[{"a": 5},\n{"b": ', 1, 1), ("[1 2]", 1, 1), ("[1,]", 1, 1), ("[,1]", 0, 1),
        ("[1", 1, 1), ("[1][2]", 1, 1), ("[1] 2", 1, 1), ("[" * 100_000, 0, 1), ("[,]", 0, 1),
        ('{\n"a": 5}\n{"b": \n', 1, 1), ('{\n"a": 5}\n7 8 x', 3, 1),
        ('{"t": 1, "prompt": "a\n{"t": 2}\n{"t": \udcff}\n', 1, 2),
    ],
)  # fmt: skip
def test_broken_json_gives_what_is_whole(
    tmp_path: Path, text: str, num_good: int, num_wrong: int
) -> None:
    good, wrong = read(tmp_path, text.encode(errors="surrogateescape"))
    assert (len(good), len(wrong)) == (num_good, num_wrong)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize("num_lost", [1, 2000])
def test_a_truncated_file_gives_the_rows_before(
    tmp_path: Path, compress: Callable[[bytes], bytes], num_lost: int
) -> None:
    rows = [{"prompt": f"prompt {i * 7919 % 100_003}", "output_tokens": 5} for i in range(50_000)]
    good, wrong = read(tmp_path, compress(json_lines(rows))[:-num_lost])
    assert good == rows[: len(good)] != []
    assert wrong[-1].startswith("where the file breaks off")
    *_, (place, _) = raw_rows(str(tmp_path / "log"))
    assert place == f"{tmp_path / 'log'}:{len(good) + len(wrong)}"


SERVER_LOG = """
a warning
[2026-09-21 14:13:20 TP0] {"event": 1}
loading: 10 %
[2026-09-21 14:13:20] ready
{"event": 2}
[2026-09-21 14:13:21] Finish: obj=GenerateReqInput(rid=5)
"""


def test_a_servers_log_has_rows_between_other_lines(tmp_path: Path) -> None:
    good, wrong = read(tmp_path, SERVER_LOG.encode())
    assert good == [{"event": 1}, {"event": 2}]
    assert [said.partition(":")[0] for said in wrong] == ["in SGLang's text format"]
    places = [place.rpartition(":")[2] for place, _ in raw_rows(str(tmp_path / "log"))]
    assert places == ["3", "6", "7"]


@pytest.mark.parametrize("content", [b"PK\x03\x04junk", b"\0\1\2\3", parquet(ROWS)[:-20], None])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    with pytest.raises(DatasetError):
        list(raw_rows(str(tmp_path / "log")))


def test_an_endless_line_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINE_CHARS", 1000)
    monkeypatch.setattr(json_values, "MOST_CHARS", 1000)
    monkeypatch.setattr(json_values, "_CHARS", 100)
    monkeypatch.setattr(server_lines, "_MOST_STRAY_CHARS", 1000)
    long = json.dumps({"prompt": "p" * 100_000})
    good, wrong = read(tmp_path, gzip.compress(f'{{"a": 1}}\n{long}\n{{"a": 2}}\n'.encode()))
    assert good == [{"a": 1}, {"a": 2}]
    assert len(wrong) == len(long) // 1000 + 1
    assert read(tmp_path, f"[{long}]".encode())[0] == []


def test_dates_of_tables_keep_their_zone(tmp_path: Path) -> None:
    when = datetime(2026, 9, 21, 14, 13, 20, 123456, tzinfo=UTC)
    there = when.astimezone(timezone(timedelta(hours=2)))
    assert read(tmp_path, parquet([{"t": there, "n": 5.0}])) == ([{"t": when, "n": 5.0}], [])
