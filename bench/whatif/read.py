"""Reads an operator's files of any known format as a TrafficLog."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.whatif.log import Logged, TrafficLog, blocks_of, in_order
from bench.workloads.prompts import WorkloadError
from predictor_store.logs.clock import FIRST_S
from predictor_store.logs.errors import RowError
from predictor_store.logs.reader import LogReader, ReadOptions, Source
from predictor_store.logs.request import LoggedRequest
from predictor_store.logs.summary import (
    cautions_of_lengths,
    cautions_of_times,
    counts_of,
    lines_of,
    span_of,
)
from predictor_store.logs.tokens import num_tokens
from predictor_store.predict.features import excerpt

# A longer log takes hours to simulate, and much memory.
MOST_REQUESTS = 100_000
_NO_ARRIVAL, _NO_LENGTH = "without an arrival time", "without an answer length"
# The arrival of a request that only gives its delay after another's answer.
_LATER = math.inf
_HELP = {
    _NO_ARRIVAL: "--rate R draws arrivals at R requests/s; `sage-sched formats` lists the formats "
    "that have them",
    _NO_LENGTH: "--tokenizer MODEL_PATH counts the tokens of answers that are texts",
}


def read_log(
    paths: Sequence[Path],
    tokenizer: Any = None,
    options: ReadOptions | None = None,
    limit: int | None = None,
    rate: float | None = None,
) -> TrafficLog:
    """Return the requests of files and folders, at most `limit`. Raises DatasetError and
    WorkloadError.

    rate: the rate of drawn arrivals, per second, for files that have none.
    """
    reader = LogReader([str(path) for path in paths], options, tokenizer)
    sources = reader.sources()
    found, most = list[Logged](), limit or MOST_REQUESTS
    drawn = None if rate is None else _poisson(rate)
    for source in sources:
        found += _requests_of(source, tokenizer, most - len(found), drawn)
    lines = lines_of(reader, sources)
    if not found:
        raise WorkloadError(_nothing_of_use(reader, sources))
    if len(found) == most:
        lines.append(f"at most {most} requests are read; --limit N sets another limit")
    lines.append(span_of([each.arrival_s for each in found]))
    if len(sources) > 1 and max(each.arrival_s for each in found) < FIRST_S:
        lines.append("note: the times of these files are no dates, so all files begin together")
    cautions = [
        *cautions_of_times(
            [each.arrival_s for each in found],
            is_ordered=len(sources) == 1 and not any(each.session for each in found),
        ),
        *cautions_of_lengths(
            [each.output_tokens for each in found], sum(each.is_cut for each in found)
        ),
    ]
    return TrafficLog(in_order(found), (*lines, *(f"CAUTION: {said}" for said in cautions)))


def _poisson(rate: float) -> Iterator[float]:
    rng, arrival_s = np.random.default_rng([0, 1]), 0.0
    while True:
        yield arrival_s
        arrival_s += float(rng.exponential(1 / rate))


def _requests_of(
    source: Source, tokenizer: Any, most: int, drawn: Iterator[float] | None
) -> list[Logged]:
    if most <= 0:
        return []
    found = list[tuple[Logged, float | None]]()
    sessions = set[str]()
    for place, request in source:
        if request.arrival is None and drawn is not None and not source.context.clock.said():
            request.arrival = next(drawn)
            source.context.notes.add(
                "arrivals are drawn at --rate: no field with the time of arrival was found"
            )
        try:
            logged = _logged(request, tokenizer, sessions)
        except RowError as error:
            source.counts.leave_out(place, error)
            continue
        if logged.session:
            sessions.add(logged.session)
        source.counts.used += 1
        found.append((logged, request.end))
        if len(found) == most:
            break
    return _in_seconds(found, source)


def _in_seconds(found: Sequence[tuple[Logged, float | None]], source: Source) -> list[Logged]:
    scale = source.context.clock.scale()
    scaled, last_s = list[Logged](), dict[str, float]()
    for each, end in found:
        arrival_s = each.arrival_s * scale
        if math.isinf(each.arrival_s):  # _LATER
            arrival_s = last_s[each.session] + (each.pause_s or 0.0)
        last_s[each.session] = arrival_s
        scaled.append(replace(each, arrival_s=arrival_s, ttlt_s=_ttlt_s(each, end, scale)))
    return scaled


def _ttlt_s(logged: Logged, end: float | None, scale: float) -> float | None:
    if logged.ttlt_s is not None or end is None or end < logged.arrival_s:
        return logged.ttlt_s
    return (end - logged.arrival_s) * scale


def _logged(request: LoggedRequest, tokenizer: Any, sessions: set[str]) -> Logged:
    """Return the request for the simulator. Raises RowError with the missing field.

    sessions: the sessions that already have a request.
    """
    arrival = request.arrival
    if arrival is None and request.pause_s is not None and request.session in sessions:
        arrival = _LATER
    if arrival is None:
        raise RowError(_NO_ARRIVAL)
    input_tokens, output_tokens = request.input_tokens, request.output_tokens
    if output_tokens is None:
        if not request.output or tokenizer is None:  # an answer that calls a tool has no text
            raise RowError(_NO_LENGTH)
        output_tokens = num_tokens(tokenizer, request.output)
    if input_tokens is None:
        if not request.prompt or tokenizer is None:
            raise RowError("without a prompt length")
        input_tokens = num_tokens(tokenizer, request.prompt)
    if min(input_tokens, output_tokens) < 1:
        raise RowError("with no tokens", f"{input_tokens} of input and {output_tokens} of output")
    blocks, block_tokens = request.blocks, request.block_tokens
    if not blocks:
        blocks, block_tokens = blocks_of(request.ids or request.prompt)
    return Logged(
        arrival_s=arrival,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cap_tokens=request.cap_tokens,
        is_cut=request.is_cut,
        prompt=excerpt(request.prompt),
        prompt_chars=len(request.prompt),
        blocks=blocks,
        block_tokens=block_tokens,
        ttlt_s=request.ttlt_s,
        forecast=request.forecast,
        session=request.session,
        id=request.id,
        parent=request.parent,
        pause_s=request.pause_s,
    )


def _nothing_of_use(reader: LogReader, sources: Sequence[Source]) -> str:
    formats = ", ".join(dict.fromkeys(source.format.name for source in sources))
    reasons = [reason for source in sources for reason in source.counts.left_out]
    help_ = next((f". {_HELP[reason]}" for reason in reasons if reason in _HELP), "")
    names = ", ".join(reader.paths)
    return f"{names}: no request found, in format {formats}: {counts_of(sources)}{help_}"
