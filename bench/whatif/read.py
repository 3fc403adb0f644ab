"""Whatever an operator has, read as a TrafficLog."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from bench.whatif import tables
from bench.whatif.log import Collected, Logged, TrafficLog, blocks_of
from bench.workloads.prompts import WorkloadError
from predictor_store.data import server_records
from predictor_store.data.files import MOST_LINE_CHARS, text_lines
from predictor_store.data.server_records import Answered
from sage_sched.fields import MALFORMED

_OF_LOG = "requests of SGLang's request log"


def read_log(paths: Sequence[Path], tokenizer: Any = None) -> TrafficLog:
    """All that the files hold, and those of folders. tokenizer: see server_records.read_line.
    Raises WorkloadError, which names the file."""
    files = [file for path in paths for file in _files(path)]
    into = Collected()
    for file in files:
        try:
            _read(file, into, tokenizer)
        except (OSError, EOFError, zlib.error, csv.Error, ValueError) as error:
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
        is_gzip = opened.read(2) == b"\x1f\x8b"
        opened.seek(0)
        with gzip.open(opened) if is_gzip else opened as file:
            _read_open(file, path, into, tokenizer)  # type: ignore[arg-type]


def _read_open(file: IO[bytes], path: Path, into: Collected, tokenizer: Any) -> None:
    lines = tqdm(
        text_lines(file), desc=f"reading {path.name}", unit="line", mininterval=1, leave=False
    )
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    if tables.is_header(first[1]):
        _read_csv(first[1], numbered, path, into)
    else:
        _read_lines(itertools.chain([first], numbered), path, into, tokenizer)


def _logged(found: Answered) -> Logged:
    blocks, block_tokens = blocks_of(found.ids or found.prompt)
    return Logged(
        arrival_s=found.arrival_s,
        input_tokens=found.input_tokens,
        output_tokens=found.output_tokens,
        cap_tokens=found.cap_tokens,
        is_cut=found.is_cut,
        prompt=found.prompt,
        blocks=blocks,
        block_tokens=block_tokens,
        ttlt_s=found.ttlt_s,
    )


def _read_csv(head: str, rows: Iterator[tuple[int, str]], path: Path, into: Collected) -> None:
    csv.field_size_limit(MOST_LINE_CHARS)  # prompts are long
    names = next(csv.reader([head.strip()]))
    # csv takes a text that goes over several lines, so that it is to see the lines itself.
    reader = csv.reader(line for _, line in rows)
    for number in itertools.count(2):
        place = f"{path}: row {number}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            into.leave_out(f"{place}: {error}")
        else:
            _add(into, tables.TABLE, place, dict(zip(names, values, strict=False)))


def _add(into: Collected, kind: str, place: str, row: dict[str, Any]) -> None:
    try:
        if kind == tables.BENCH_SERVING:
            for request in tables.requests_of_run(row):
                into.add(kind, place, request)
        else:
            into.add(kind, place, tables.request_of(row, kind))
    except MALFORMED as error:
        into.leave_out(f"{place} is not as {kind} are: {error}")


def _read_lines(
    numbered: Iterator[tuple[int, str]], path: Path, into: Collected, tokenizer: Any
) -> None:
    """JSON lines, and SGLang's log, whose other lines do not matter."""
    for number, line in server_records.without_noise(numbered):
        _read_line(line, f"{path}:{number}", tokenizer, into)


def _read_line(line: str, place: str, tokenizer: Any, into: Collected) -> None:
    try:
        for row in server_records.read_line(line, tokenizer):
            if isinstance(row, Answered):
                into.add(_OF_LOG, place, _logged(row))
            elif isinstance(row, dict):
                _add(into, tables.kind_of(row), place, row)
            else:
                raise ValueError("it is no object")
    except json.JSONDecodeError as error:
        into.leave_out(f"{place} is no JSON, no header of columns, and no server's line ({error})")
    except MALFORMED as error:
        into.leave_out(f"{place} is no line of a log: {error!r}")
