"""Reads guidellm's benchmarks.json, of all versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Format
from predictor_store.logs.messages import prompt_of
from predictor_store.logs.request import LoggedRequest

_GROUPS = ("successful", "errored", "incomplete")
# The field that a record gets for its group.
_GROUP = "sage_group"


def _is_report(row: Mapping[str, Any]) -> bool:
    benchmarks = row.get("benchmarks", [row])
    first = benchmarks[0] if isinstance(benchmarks, list) and benchmarks else None
    requests = first.get("requests") if isinstance(first, Mapping) else None
    return isinstance(requests, Mapping) and "successful" in requests


def _records(row: Mapping[str, Any]) -> Iterator[Any]:
    for benchmark in row.get("benchmarks", [row]):
        groups = benchmark.get("requests") if isinstance(benchmark, Mapping) else None
        if not isinstance(groups, Mapping):
            yield None
            continue
        for name in _GROUPS:
            for each in groups.get(name) or ():
                yield {**each, _GROUP: name} if isinstance(each, Mapping) else each


def _read(row: Row, context: Context) -> LoggedRequest:
    if row.data[_GROUP] != "successful":
        raise RowError("that failed", f"it is {row.data[_GROUP]}")
    start = row.find("arrival", "request_start_time", "start_time", "info.timings.request_start")
    end = row.find("end", "request_end_time", "end_time", "info.timings.request_end")
    if start is None:
        raise RowError("without an arrival time")
    return LoggedRequest(
        arrival=context.clock.read(start, "s"),
        end=None if end is None else context.clock.read(end, "s"),
        input_tokens=row.tokens("input", "prompt_tokens", *_tokens("input")),
        output_tokens=row.tokens("output", "output_tokens", *_tokens("output")),
        prompt=prompt_of(row.find("prompt", "prompt", "request_args")),
        output=row.find("text", "output"),
    )


def _tokens(side: str) -> list[str]:
    return [f"{side}_metrics.total_tokens", f"{side}_metrics.text_tokens"]


FORMAT = Format(
    "guidellm",
    "guidellm's `benchmarks.json`",
    '{"benchmarks": [{"requests": {"successful": [{"request_start_time": 1790000000.1, '
    '"request_end_time": 1790000002.3, "prompt_tokens": 305, "output_tokens": 157}]}}]}',
    "arrivals, lengths, prompts",
    _is_report,
    _read,
    _records,
)
