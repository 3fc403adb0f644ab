"""Finds the request log in the lines of an SGLang server's own log.

The request log comes from --log-requests with --log-requests-format json, in a server's log or in
files of --log-requests-target (sglang/srt/utils/request_logger.py and log_utils.py).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from predictor_store.logs.errors import RowError

_LINE = re.compile(r"\[\d{4}-\d\d-\d\d ")
# At most this many characters of possible noise are held back; each line costs _STRAY_CHARS more.
_MOST_STRAY_CHARS, _STRAY_CHARS = 2**24, 200
_TEXT_FORMAT = "] Finish: obj="


# The prefixes that CRI, kubectl, docker compose and systemd's journal give a container's line.
_PREFIX = re.compile(
    r"(?:\[pod/\S+\] |[\w.-]+ +\| (?=[{\[])|\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d) )+"
    r"(?:std(?:out|err) (?P<part>[FP])(?::\S*)? )?"
)


def unwrapped(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield numbers and lines without the prefixes of containers' logs. The parts of a split line
    are joined."""
    begun = ""
    for number, line in numbered:
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        is_whole = not (prefix and prefix["part"] == "P")
        if text.startswith('{"log":'):  # Docker's json-file, which splits long lines too
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(text)
                if "stream" in row and isinstance(row["log"], str):
                    text, is_whole = row["log"], row["log"].endswith("\n")
        begun += text if is_whole else text.rstrip("\n")
        if is_whole:
            yield number, begun
            begun = ""
    if begun:
        yield number, begun


def is_line(line: str) -> bool:
    """Whether a server wrote the line: it begins with date and time."""
    return _LINE.match(line) is not None


def without_noise(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield numbers and lines of a server's log, without warnings and progress bars between its own
    lines.

    All lines of any other file are yielded, and lines that begin no JSON object come last.
    """
    strays, num_chars, is_log = list[tuple[int, str]](), 0, False
    for number, line in numbered:
        if is_line(line):
            is_log = True
            strays.clear()
        if is_line(line) or line.lstrip().startswith("{"):
            yield number, line
        elif not is_log:
            strays.append((number, line))
            num_chars += len(line) + _STRAY_CHARS
            if num_chars > _MOST_STRAY_CHARS:  # no server's log begins with more noise
                yield from strays
                strays.clear()
                num_chars = 0
    yield from strays


def rows_of_line(line: str) -> list[Any]:
    """Return the JSON of a line, or a RowError; nothing for a server's line without JSON."""
    is_server = is_line(line)
    try:
        return [json.loads(line[line.find("{") :] if is_server else line)]
    except (ValueError, RecursionError) as error:
        if not is_server:
            return [RowError("that is no JSON", str(error))]
        if _TEXT_FORMAT in line:
            return [
                RowError("in SGLang's text format", "unreadable; use --log-requests-format json")
            ]
        return []
