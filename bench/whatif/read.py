"""Whatever an operator has, read as a TrafficLog."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from bench.whatif import request_dumps, request_log, tables
from bench.whatif.log import Collected, Logged, TrafficLog
from bench.workload.prompts import WorkloadError

# What a row that is not as it should be may raise.
_ROW_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def read_log(paths: Sequence[Path], tokenizer: Any = None) -> TrafficLog:
    """All that the files hold, and those of folders. tokenizer: see request_dumps.read_dump.
    Raises WorkloadError, which names the file."""
    files = [file for path in paths for file in _files(path)]
    into = Collected()
    for file in files:
        try:
            _read(file, into, tokenizer)
        except (OSError, EOFError, zlib.error) as error:
            raise WorkloadError(f"cannot read {file}: {error}") from error
    return into.log([str(path) for path in paths])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.is_file())
    if not found:
        raise WorkloadError(f"there is no file in {path}")
    return found


def _read(path: Path, into: Collected, tokenizer: Any) -> None:
    with path.open("rb") as opened:
        if opened.read(2) == b"\x1f\x8b":
            opened.seek(0)
            with gzip.open(opened) as file:
                _read_open(file, path, into, tokenizer)  # type: ignore[arg-type]
        else:
            opened.seek(0)
            _read_open(opened, path, into, tokenizer)


def _read_open(file: IO[bytes], path: Path, into: Collected, tokenizer: Any) -> None:
    is_pickle = file.read(1) == request_dumps.MAGIC
    file.seek(0)
    if is_pickle:
        for place, found in request_dumps.read_dump(file, path, tokenizer):
            if isinstance(found, str):
                into.leave_out(f"{place}: {found}")
            else:
                into.add(request_dumps.KIND, place, found)
        return
    bar = tqdm(file, desc=f"reading {path.name}", unit="line", mininterval=1, leave=False)
    lines = (line.decode("utf-8", "replace") for line in bar)
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    head = first[1].lstrip("\ufeff").lstrip()
    if "," in head and head[0] not in "[{":
        _read_csv(head, numbered, path, into)
    else:
        _read_lines([first], numbered, path, into, tokenizer)


def _read_csv(head: str, rows: Iterator[tuple[int, str]], path: Path, into: Collected) -> None:
    reader = csv.DictReader([head.strip()])
    names = reader.fieldnames or []
    # csv takes a text that goes over several lines, so that it is to see the lines itself.
    for number, values in enumerate(csv.reader(line for _, line in rows), 2):
        place = f"{path}: row {number}"
        row = dict(zip(names, values, strict=False))
        _add(into, tables.TABLE, place, row)


def _add(into: Collected, kind: str, place: str, row: dict[str, Any]) -> None:
    try:
        if kind == tables.BENCH_SERVING:
            for request in tables.requests_of_run(row):
                into.add(kind, place, request)
        else:
            into.add(kind, place, tables.request_of(row, kind))
    except _ROW_ERRORS as error:
        into.leave_out(f"{place} is not as {kind} are: {error}")


def _read_lines(
    first: list[tuple[int, str]],
    more: Iterator[tuple[int, str]],
    path: Path,
    into: Collected,
    tokenizer: Any,
) -> None:
    """JSON lines, and SGLang's log, whose other lines do not matter."""
    log = request_log.RequestLog(tokenizer)
    for numbered in (first, more):
        for number, line in numbered:
            _read_line(line, f"{path}:{number}", log, into)


def _read_line(line: str, place: str, log: request_log.RequestLog, into: Collected) -> None:
    of_server = line.startswith("[20")
    text = line[line.find("{") :] if of_server else line.lstrip("\ufeff")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not of_server:
            into.leave_out(f"{place}: it is not JSON ({error})")
            return
        row = None
    try:
        found: Logged | None = None
        if of_server and not isinstance(row, dict):
            found = request_log.request_of_text(line)
        elif not isinstance(row, dict):
            raise ValueError("it is no object")
        elif "event" in row:
            found = log.request_of(row)
        else:
            _add(into, tables.kind_of(row), place, row)
    except _ROW_ERRORS as error:
        into.leave_out(f"{place} is no line of a log: {error!r}")
        return
    if found is not None:
        into.add(request_log.KIND, place, found)
