"""What SGLang writes down of requests and their answers: its request log, and its request dumps.

The log is that of --log-requests, as JSON or as text, in a server's log or in files of
--log-requests-target (sglang/srt/utils/request_logger.py and log_utils.py). Dumps are pickles that
`POST /configure_logging` has a server write, and those of --crash-dump-folder
(sglang/srt/managers/tokenizer_manager.py, dump_requests).
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

# What a record may raise that is not as SGLang writes it.
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
# How a dump begins.
MAGIC = b"\x80"
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


def _answered(
    asked: Mapping[str, Any],
    meta: Mapping[str, Any],
    arrival_s: float,
    ttlt_s: float,
    tokenizer: Any,
) -> Answered:
    """asked: the request's fields. meta: its answer's meta_info."""
    ids: Any = asked.get("input_ids")
    if not (isinstance(ids, list | tuple) and ids and isinstance(ids[0], int) and "..." not in ids):
        ids = ()
    text = asked.get("text")
    if not isinstance(text, str):
        text = str(tokenizer.decode(list(ids))) if ids and tokenizer is not None else ""
    reason = meta.get("finish_reason")
    is_cut = isinstance(reason, Mapping) and reason.get("type", "stop") != "stop"
    num_in, num_out = int(meta["prompt_tokens"]), int(meta["completion_tokens"])
    return Answered(arrival_s, num_in, num_out, _cap_of(asked), is_cut, ttlt_s, text, ids)


def _cap_of(asked: Mapping[str, Any]) -> int | None:
    # As in sglang/srt/sampling/sampling_params.py: 128 if nobody names it, none if it is null.
    sampling = asked.get("sampling_params")
    if not isinstance(sampling, Mapping):
        return None
    cap = sampling.get("max_new_tokens", 128)
    return 0 if cap is None else int(cap)


def is_line(line: str) -> bool:
    """Whether a server wrote it: it begins with date and time."""
    return _LINE.match(line) is not None


def is_row(row: object) -> bool:
    """Whether it is the JSON of such a line, from a log that leaves out date and time."""
    return isinstance(row, dict) and str(row.get("event")).startswith("request.")


def without_noise(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Numbers and lines of a server's log, without warnings and progress bars between its own. Of
    any other file all lines; those that begin no JSON object come last."""
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


class RequestLog:
    """One log, in its order: when a request was received is remembered until it finishes."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: see read_dump."""
        self._tokenizer = tokenizer
        self._received_s: dict[str, float] = {}

    def of_line(self, line: str) -> Answered | None:
        """From a line (is_line) that tells of a finish, see of_row; None from any other."""
        try:
            row = json.loads(line[line.find("{") :])
        except (ValueError, RecursionError):
            row = None
        return self.of_row(row) if is_row(row) else _of_text(line)

    def of_row(self, row: Mapping[str, Any]) -> Answered | None:
        """From JSON (is_row) that tells of a finish; None from any other. Raises MALFORMED."""
        at_s = datetime.fromisoformat(row["timestamp"]).timestamp()
        if row["event"] == RECEIVED:
            if isinstance(row.get("rid"), str):
                self._received_s[row["rid"]] = at_s
            return None
        if row["event"] != FINISHED:
            return None
        asked, meta = dict(row["obj"]), row["out"]["meta_info"]
        text = asked.get("text")
        if isinstance(text, str) and len(text) == _CUT_TEXT_CHARS:
            asked["text"] = text[:1024]  # its beginning, which is what is read most of
        latency_s = float(meta["e2e_latency"])
        arrival_s = self._received_s.pop(str(row.get("rid")), at_s - latency_s)
        return _answered(asked, meta, arrival_s, latency_s, self._tokenizer)


def _of_text(line: str) -> Answered | None:
    """From a line in SGLang's text format that tells of a finish, to the second and without its
    prompt; None from another line. Raises ValueError if a number is missing."""
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


class Husk:
    """In a loaded pickle, an object of any class: the class is not loaded, and nothing of it runs.
    fields: its state, by name."""

    fields: dict[str, Any]

    def __new__(cls, *args: object, **named: object) -> Husk:
        # Most are made without __init__.
        made = super().__new__(cls)
        made.fields = {}
        made.__setstate__((*args, named))
        return made

    def __setstate__(self, state: object) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.fields.update((str(name), value) for name, value in part.items())

    # Called for pickled lists, dicts and sets of other classes.
    def append(self, _: object) -> None:
        pass

    extend = add = append

    def __setitem__(self, name: object, value: object) -> None:
        self.fields[str(name)] = value


class _Unpickler(pickle.Unpickler):
    """Loading a pickle can run any code that it names; here every class is a Husk."""

    def find_class(self, module: str, name: str) -> Any:
        return Husk

    def persistent_load(self, pid: object) -> Any:
        return Husk()


def read_dump(file: IO[bytes], path: Path, tokenizer: Any) -> Iterator[tuple[str, Answered | str]]:
    """Each request with its place, or why it is of no use. Raises ValueError.

    tokenizer: to read prompts that are token ids; None: these have no text.
    """
    try:
        dump = _Unpickler(file).load()
        dumped = list(dump["requests"])
    except Exception as error:  # a pickle that is none can raise anything
        raise ValueError(f"{path} is no request dump of SGLang: {error!r}") from error
    for number, entry in enumerate(dumped, 1):
        place = f"{path}: request {number}"
        try:
            asked, answer, created_s, finished_s = entry
            begun_s, ttlt_s = float(created_s), float(finished_s) - float(created_s)
            yield place, _answered(_plain(asked), answer["meta_info"], begun_s, ttlt_s, tokenizer)
        except MALFORMED as error:
            yield place, f"it is not as SGLang writes it ({error!r})"


def _plain(of: object) -> Mapping[str, Any]:
    """The fields of a request, and those of its sampling parameters."""
    if not isinstance(of, Husk):
        raise TypeError(f"{of!r:.80} is no request")
    sampling = of.fields.get("sampling_params")
    if isinstance(sampling, Husk):
        return {**of.fields, "sampling_params": sampling.fields}
    return of.fields
