"""Reads lines of text from a file that may be compressed, with a progress bar."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from tqdm import tqdm

from predictor_store.logs.errors import DatasetError

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_ARCHIVES = {b"PK\x03\x04": "a zip archive", b"\x1f\x9d": "compressed by `compress`"}
_WIDE = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
# The longest line. It is this long because bench_serving writes a whole run in one line.
MOST_LINE_CHARS = 2**26


def text_lines(file: IO[bytes], encoding: str = "utf-8-sig") -> Iterator[str]:
    """Yield the lines of a text.

    They end with a line feed, a carriage return or both. A byte that is not UTF-8 spoils only its
    own line. Overlong lines are split, so that a damaged or hostile file takes no more memory than
    any other.
    """
    text = io.TextIOWrapper(file, encoding, "replace", newline=None)
    while line := text.readline(MOST_LINE_CHARS):
        yield line


def magic_of(path: Path) -> bytes:
    """Return the first bytes of a file. Raises DatasetError for an archive, and OSError."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic in _ARCHIVES or magic[:2] in _ARCHIVES:
        raise DatasetError(f"{path} is {_ARCHIVES.get(magic) or _ARCHIVES[magic[:2]]}: unpack it")
    return magic


@contextlib.contextmanager
def opened_lines(path: Path) -> Iterator[Iterator[str]]:
    """Open the lines of a file: text, gzip or zstd. Raises OSError, EOFError and zlib.error if it
    is damaged."""
    magic = magic_of(path)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        bar = stack.enter_context(
            tqdm(
                total=path.stat().st_size, desc=f"reading {path.name}", unit="B", unit_scale=True,
                mininterval=1, delay=1, leave=False,
            )
        )  # fmt: skip
        counted = _Counted(file, bar)
        if magic[:2] == GZIP:
            yield text_lines(cast(IO[bytes], gzip.GzipFile(fileobj=cast(Any, counted))))
        elif magic == ZSTD:
            import pyarrow

            yield text_lines(pyarrow.CompressedInputStream(counted, "zstd"))
        else:
            yield text_lines(
                cast(IO[bytes], io.BufferedReader(counted)), _WIDE.get(magic[:2], "utf-8-sig")
            )


class _Counted(io.RawIOBase):
    """A file that moves a progress bar as it is read."""

    def __init__(self, file: IO[bytes], bar: tqdm[Any]) -> None:
        self._file, self._bar = file, bar

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._bar.update(len(content))
        return len(content)
