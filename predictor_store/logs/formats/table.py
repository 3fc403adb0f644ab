"""Reads a user's own tables, with one request per row and common names of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, cap, duration_s, parsed, plain_name, whole
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.messages import CHATS, answer_of, prompt_of, was_cut
from predictor_store.logs.request import LoggedRequest

# Names without case, marks and unit (see plain_name). If a row has several, the first is read.
ARRIVAL = (
    "arrival", "arrivaltime", "arrivaltimestamp", "arrivedat", "requestarrival",
    "requestarrivaltime", "requestreceived", "receivedat", "requestedat", "requeststart",
    "requeststarttime", "requesttime", "requesttimestamp", "scheduledtime", "starttime", "start",
    "startedat", "starttimestamp", "starttimeunix", "timestamp", "timestampunix", "time",
    "requestcreatedat", "datetime", "date", "createdat", "createtime", "created", "eventtime",
    "ts", "t", "unixtime", "tstamp",
)  # fmt: skip
END = (
    "end", "endtime", "endedat", "finishedat", "finishtime", "completedat",
    "requestend", "requestendtime", "responsetimestamp",
)  # fmt: skip
INPUT = (
    "inputtokens", "prompttokens", "inputlen", "inputlength", "promptlen", "promptlength",
    "contexttokens", "contextlength", "requesttokens", "numinputtokens", "numprompttokens",
    "ninputtokens", "nprompttokens", "inputtokencount", "prompttokencount", "numprefilltokens",
    "prefilltokens", "prefilllength", "inputsequencelength", "isl", "intokens", "tokensin",
    "tokensinput", "tokensprompt", "requestinputtokens", "totalinputtokens", "usageprompttokens",
    "usageinputtokens", "genaiusageinputtokens", "inputsize", "in", "input",
)  # fmt: skip
OUTPUT = (
    "outputtokens", "completiontokens", "outputlen", "outputlength", "responsetokens",
    "generatedtokens", "generationtokens", "numoutputtokens", "numcompletiontokens",
    "numgeneratedtokens", "noutputtokens", "ncompletiontokens", "outputtokencount",
    "completiontokencount", "numdecodetokens", "decodetokens", "decodelength",
    "outputsequencelength", "osl", "outtokens", "tokensout", "tokensoutput", "tokenscompletion",
    "tokensgenerated", "responselen", "responselength", "completionlen", "completionlength",
    "answerlen", "answerlength", "answertokens", "totaloutputtokens", "requestoutputtokens",
    "usagecompletiontokens", "usageoutputtokens", "genaiusageoutputtokens", "outputsize", "out",
    "output", "response", "completion",
)  # fmt: skip
CAP = (
    "maxnewtokens", "maxtokens", "maxcompletiontokens", "maxoutputtokens", "maxgentokens", "cap",
)  # fmt: skip
TTLT = (
    "ttlt", "e2elatency", "latency", "elapsedtime", "elapsed", "duration", "requestlatency",
    "totallatency", "responsetime", "totaltime", "endtoendlatency",
)  # fmt: skip
PROMPT = (
    "prompt", "prompttext", "instruction", "question", "query", "problem", "userprompt",
    "usermessage", "human", "user", "inputtext", "input", "text", "request",
)  # fmt: skip
ANSWER = (
    "output", "response", "completion", "answer", "generation", "generatedtext", "solution",
    "outputtext", "responsetext", "reply", "assistant", "gpt",
)  # fmt: skip
SESSION = ("sessionid", "conversationid", "sessiontag", "session", "chatid", "threadid")
FINISH = ("finishreason", "stopreason", "finishreasons")
STATUS = ("statuscode", "status", "httpstatus", "error", "errormessage", "success")
_COUNTS = ("input", "in", "output", "out", "response", "completion")
_ALL = frozenset((*ARRIVAL, *INPUT, *OUTPUT, *PROMPT, *ANSWER, *CHATS))
_FAILED = {"error", "failed", "failure", "cancelled", "canceled", "timeout", "aborted", "false"}


def is_known_column(name: str) -> bool:
    """Whether a table with this column may be one of requests."""
    return plain_name(name)[0] in _ALL


def _is_row(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("observations"), list):  # a trace of Langfuse, which contains requests
        return False
    names = {plain_name(name)[0] for name in row}
    has_answer = not names.isdisjoint((*OUTPUT, *ANSWER))
    return (has_answer and not names.isdisjoint((*ARRIVAL, *INPUT, *PROMPT))) or "prompt" in names


def read(row: Row, context: Context) -> LoggedRequest:
    """Return the request of a row. Raises RowError."""
    fields = _fields_of(row.data)
    prompt = _text(fields, PROMPT)
    answer = _text(fields, ANSWER) if prompt or not _has_count(fields, OUTPUT) else None
    if name := _failure(fields):
        raise RowError("that failed", name)
    request = LoggedRequest(
        input_tokens=_count(row, "input", fields, INPUT, prompt),
        output_tokens=_count(row, "output", fields, OUTPUT, prompt),
        output=None if answer is None else answer_of(answer),
        prompt=prompt_of(prompt) if prompt else "",
        cap_tokens=_count(row, "cap", fields, CAP, prompt),
        is_cut=row.data.get("is_cut") is True,
    )
    if prompt and "instruction" in fields and isinstance(row.data.get("input"), str):
        # Alpaca has the subject of an instruction in another field.
        about = row.data["input"]
        request.prompt += f"\n\n{about}" if about and fields["instruction"][1] == prompt else ""
    request.arrival = time_of(row, "arrival", context)
    request.end = time_of(row, "end", context)
    if found := _found(fields, TTLT):
        name, value, unit = found
        request.ttlt_s = duration_s(value, name, unit or "s")
    if found := _found(fields, SESSION):
        row.used("session", found[0])
        request.session = str(found[1])
    if found := _found(fields, FINISH):
        request.is_cut = was_cut(parsed(found[1]))
    return request


def time_of(row: Row, meaning: str, context: Context) -> float | None:
    """Return the row's "arrival" or "end"; None if there is none. Raises RowError."""
    found = _found(_fields_of(row.data), ARRIVAL if meaning == "arrival" else END)
    if found is None:
        return None
    name, value, unit = found
    row.used(meaning, name)
    return context.clock.read(value, unit)


_Fields = dict[str, tuple[str, Any, str | None]]


def _fields_of(data: Mapping[str, Any]) -> _Fields:
    """Return name, value and unit of each field, also in nested objects, by plain name."""
    found = _Fields()
    for name, value in data.items():
        if isinstance(value, Mapping) and name.lower() in ("usage", "metadata", "metrics"):
            for inner, each in value.items():
                plain, unit = plain_name(inner)
                found.setdefault(plain, (f"{name}.{inner}", each, unit))
        plain, unit = plain_name(name)
        if value not in (None, "") and value == value:
            found[plain] = name, value, unit
    return found


def _found(fields: _Fields, names: tuple[str, ...]) -> tuple[str, Any, str | None] | None:
    return next((fields[name] for name in names if name in fields), None)


def _is_count(name: str, value: Any) -> bool:
    """Whether a field that may be a text or a number of tokens is a number."""
    if isinstance(value, str) and name in _COUNTS:
        return value.strip().replace(".", "", 1).isdigit()
    return not isinstance(value, str | Mapping | list) or name not in _COUNTS


def _has_count(fields: _Fields, names: tuple[str, ...]) -> bool:
    return any(name in fields and _is_count(name, fields[name][1]) for name in names)


def _count(
    row: Row, meaning: str, fields: _Fields, names: tuple[str, ...], prompt: Any
) -> int | None:
    for name in names:
        if name in fields and _is_count(name, fields[name][1]):
            field, value, _ = fields[name]
            if isinstance(value, str) and name in _COUNTS and prompt:
                continue  # the answer itself is a number
            row.used(meaning, field)
            return (cap if meaning == "cap" else whole)(value, field)
    return None


def recorded_lengths(row: Row) -> tuple[int | None, int | None]:
    """Return input and output tokens if the row has fields for them. Raises RowError."""
    fields = _fields_of(row.data)
    is_chat = True  # such a field is the text, not its length
    return (
        _count(row, "input", fields, INPUT, is_chat),
        _count(row, "output", fields, OUTPUT, is_chat),
    )


def _text(fields: _Fields, names: tuple[str, ...]) -> Any:
    for name in names:
        if name in fields and isinstance(fields[name][1], str | Mapping | list):
            _, value, _ = fields[name]
            if name not in _COUNTS or not _is_count(name, value):
                return value
    return None


def _failure(fields: _Fields) -> str:
    """Return the field that marks the request as failed, with its value; "" if none does."""
    for name in STATUS:
        if name not in fields:
            continue
        field, value, _ = fields[name]
        text = str(value).strip().lower()
        is_code = text.isdigit() and 400 <= int(text) < 600
        is_error = name in ("error", "errormessage") and text not in ("none", "null", "0", "false")
        if is_code or text in _FAILED or is_error:
            return f"{field} is {value!r:.60}"
    return ""


READER = Reader(read, recognizes=_is_row)
