"""SGLang's request log: --log-requests, as JSON or as text, in a server's log or in files of
--log-requests-target (sglang/srt/utils/request_logger.py and log_utils.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from predictor_store.data.answered import Answered, cap_of, is_cut

RECEIVED, FINISHED = "request.received", "request.finished"
# SGLang cuts longer texts in their middle at --log-requests-level 2.
_CUT_TEXT_CHARS = 2048 + len("...")
_LINE = re.compile(r"\[\d{4}-\d\d-\d\d ")
_TEXT_LINE = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] Finish: obj=")
_NUMBERS = {
    "prompt_tokens": re.compile(r"'prompt_tokens': (\d+)"),
    "completion_tokens": re.compile(r"'completion_tokens': (\d+)"),
    "e2e_latency": re.compile(r"'e2e_latency': ([\d.e+-]+)"),
}
_CAP = re.compile(r"'max_new_tokens': (None|\d+)")
_REASON = re.compile(r"'finish_reason': \{'type': '(\w+)'")


def is_line(line: str) -> bool:
    """Whether a server wrote it: it begins with date and time."""
    return _LINE.match(line) is not None


def without_noise(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Numbers and lines of a server's log without the warnings and progress bars that stand between
    its own. Of any other file all, those that begin no JSON object last."""
    strays, is_log = list[tuple[int, str]](), False
    for number, line in numbered:
        if is_line(line):
            is_log = True
            strays.clear()
        if is_line(line) or line.lstrip().startswith("{"):
            yield number, line
        elif not is_log:
            strays.append((number, line))
    yield from strays


def is_row(row: object) -> bool:
    """Whether it is JSON of such a line, from a log that leaves out date and time."""
    return isinstance(row, dict) and str(row.get("event")).startswith("request.")


class RequestLog:
    """One log, in its order: what was received is remembered until it finishes."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: see request_dumps.read_dump."""
        self._tokenizer = tokenizer
        self._received_s: dict[str, float] = {}

    def of_line(self, line: str) -> Answered | None:
        """Of a line (is_line) that tells of a finish, see of_row; None of any other."""
        try:
            row = json.loads(line[line.find("{") :])
        except (ValueError, RecursionError):
            row = None
        return self.of_row(row) if is_row(row) else _of_text(line)

    def of_row(self, row: Mapping[str, Any]) -> Answered | None:
        """Of JSON (is_row) that tells of a finish; None of one that does not. Raises MALFORMED."""
        at_s = datetime.fromisoformat(row["timestamp"]).timestamp()
        if row["event"] == RECEIVED:
            if isinstance(row.get("rid"), str):
                self._received_s[row["rid"]] = at_s
            return None
        if row["event"] != FINISHED:
            return None
        asked, meta = row["obj"], row["out"]["meta_info"]
        latency_s = float(meta["e2e_latency"])
        ids = asked.get("input_ids")
        whole_ids = ids if isinstance(ids, list) and "..." not in ids else ()
        return Answered(
            arrival_s=self._received_s.pop(str(row.get("rid")), at_s - latency_s),
            input_tokens=int(meta["prompt_tokens"]),
            output_tokens=int(meta["completion_tokens"]),
            cap_tokens=cap_of(asked),
            is_cut=is_cut(meta),
            prompt=self._text(asked.get("text"), whole_ids),
            ids=whole_ids,
            ttlt_s=latency_s,
        )

    def _text(self, text: object, ids: Sequence[int]) -> str:
        """A text that was cut has its beginning, which is what is read most of."""
        if isinstance(text, str):
            return text[:1024] if len(text) == _CUT_TEXT_CHARS else text
        if ids and self._tokenizer is not None:
            return str(self._tokenizer.decode(ids))
        return ""


def _of_text(line: str) -> Answered | None:
    """Of a line in SGLang's text format that tells of a finish, to the second and without its
    prompt; None of another line. Raises ValueError if a number is not there."""
    begins = _TEXT_LINE.match(line)
    if begins is None:
        return None
    asked, _, meta = line.rpartition("'meta_info': ")
    numbers = {}
    for name, pattern in _NUMBERS.items():
        if (found := pattern.search(meta)) is None:
            raise ValueError(f"it says nothing of {name}")
        numbers[name] = float(found[1])
    cap, reason = _CAP.search(asked), _REASON.search(meta)
    return Answered(
        arrival_s=datetime.fromisoformat(begins[1]).timestamp() - numbers["e2e_latency"],
        input_tokens=int(numbers["prompt_tokens"]),
        output_tokens=int(numbers["completion_tokens"]),
        cap_tokens=None if cap is None else 0 if cap[1] == "None" else int(cap[1]),
        is_cut=reason is not None and reason[1] != "stop",
        ttlt_s=numbers["e2e_latency"],
    )
