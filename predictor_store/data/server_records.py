"""SGLang's request log, and what it tells of requests and their answers.

It is that of --log-requests with --log-requests-format json, in a server's log or in files of
--log-requests-target (sglang/srt/utils/request_logger.py and log_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

# SGLang cuts longer texts in their middle at --log-requests-level 2.
_CUT_TEXT_CHARS = 2048 + len("...")
_LINE = re.compile(r"\[\d{4}-\d\d-\d\d ")
# The most that is held back of lines that may be noise, each with what holding it takes.
_MOST_STRAY_CHARS, _STRAY_CHARS = 2**24, 200
_TEXT_FORMAT = "] Finish: obj="


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has its answer.

    arrival_s: on the server's clock. cap_tokens: its max_new_tokens; 0 if it has none, None if that
    is not known. is_cut: something other than its own end ended the answer. ttlt_s: the time to its
    last token. prompt: its text, "" if it is not known. ids: of its prompt, () if they are not
    known, or not all.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    cap_tokens: int | None
    is_cut: bool
    ttlt_s: float
    prompt: str = ""
    ids: Sequence[int] = ()


def is_line(line: str) -> bool:
    """Whether a server wrote it: it begins with date and time."""
    return _LINE.match(line) is not None


def without_noise(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Numbers and lines of a server's log, without warnings and progress bars between its own. Of
    any other file all lines; those that begin no JSON object come last."""
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
            if num_chars > _MOST_STRAY_CHARS:  # no log has so much before its first line
                yield from strays
                strays.clear()
                num_chars = 0
    yield from strays


def read_line(line: str, tokenizer: Any) -> list[Any]:
    """What a line of a log tells: an Answered; nothing, if it tells of no answer; or its JSON, if
    no server wrote it. Raises MALFORMED.

    tokenizer: to read prompts that are token ids; None: these have no text.
    """
    try:
        row = json.loads(line[line.find("{") :] if is_line(line) else line)
    except (ValueError, RecursionError):
        if not is_line(line):
            raise
        if _TEXT_FORMAT in line:
            raise ValueError("the text format is not read: --log-requests-format json") from None
        return []
    if not isinstance(row, dict) or not str(row.get("event")).startswith("request."):
        return [] if is_line(line) else [row]
    return [_answered(row, tokenizer)] if row["event"] == "request.finished" else []


def _answered(row: Mapping[str, Any], tokenizer: Any) -> Answered:
    asked, meta = row["obj"], row["out"]["meta_info"]
    ids: Any = asked.get("input_ids")
    if not (isinstance(ids, list) and ids and isinstance(ids[0], int) and "..." not in ids):
        ids = ()
    text = asked.get("text")
    if not isinstance(text, str):
        text = str(tokenizer.decode(list(ids))) if ids and tokenizer is not None else ""
    elif len(text) == _CUT_TEXT_CHARS:
        text = text[:1024]  # its beginning, which is what is read most of
    reason = meta.get("finish_reason")
    is_cut = isinstance(reason, Mapping) and reason.get("type", "stop") != "stop"
    num_in, num_out = int(meta["prompt_tokens"]), int(meta["completion_tokens"])
    ttlt_s = float(meta["e2e_latency"])
    arrival_s = datetime.fromisoformat(row["timestamp"]).timestamp() - ttlt_s
    return Answered(arrival_s, num_in, num_out, _cap_of(asked), is_cut, ttlt_s, text, ids)


def _cap_of(asked: Mapping[str, Any]) -> int | None:
    # As in sglang/srt/sampling/sampling_params.py: 128 if nobody names it, none if it is null.
    sampling = asked.get("sampling_params")
    if not isinstance(sampling, Mapping):
        return None
    cap = sampling.get("max_new_tokens", 128)
    return 0 if cap is None else int(cap)
