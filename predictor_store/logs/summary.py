"""Writes the first lines of output of a command that reads logs: the format, its times, the rows
used, and warnings about an implausible log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from predictor_store.logs.clock import FIRST_S, LAST_S, MOST_RATE
from predictor_store.logs.reader import LogReader, Source

_MOST_FILES = 5
_ORDER = ("arrival", "input", "output", "cap", "blocks", "session")
# Below this rate, a log of more than an hour has gaps without traffic, or another unit.
_LEAST_RATE, _LONG_S = 0.01, 3600.0
# Limits of plausibility, for the share of answers of one length, the rank correlation of places and
# arrivals, and the ratio of the log's span to the span of its middle 98 %.
_SAME_SHARE, _LEAST_ORDER, _FAR = 0.9, 0.3, 100.0
# With fewer requests, none of this can be seen.
_LEAST_REQUESTS = 20


def lines_of(reader: LogReader, sources: Sequence[Source]) -> list[str]:
    """Return the lines for all files, once they are read."""
    lines = []
    for source in sources[:_MOST_FILES]:
        lines.append(f"{source.path}: {source.format.name}{_fields(source)}")
        if times := source.context.clock.said():
            lines.append(f"  times: {times}")
        lines.append(f"  {counts_of([source])}")
        lines += [f"  note: {note}" for note in sorted(source.context.notes)]
        lines += [f"CAUTION: {said}" for said in source.context.clock.cautions()]
    if len(sources) > _MOST_FILES:
        lines.append(f"and {len(sources) - _MOST_FILES} more files; all: {counts_of(sources)}")
    if reader.skipped:
        more = f" and {len(reader.skipped) - 1} more" if len(reader.skipped) > 1 else ""
        lines.append(f"not read: {reader.skipped[0]}{more}")
    return lines


def _fields(source: Source) -> str:
    named = [f"{of} {source.used[of]}" for of in _ORDER if of in source.used]
    return f", by {', '.join(named)}" if named else ""


def counts_of(sources: Sequence[Source]) -> str:
    """Return the number of requests used, and of rows left out by reason."""
    left_out, first = Counter[str](), dict[str, str]()
    for source in sources:
        left_out += source.counts.left_out
        first = source.counts.first | first
    said = f"{sum(source.counts.used for source in sources)} requests used"
    if other := sum(source.counts.other for source in sources):
        said += f"; {other} rows are no requests"
    if filtered := sum(source.counts.filtered for source in sources):
        said += f"; --filter left out {filtered}"
    if left_out:
        reasons = ", ".join(f"{number} {kind}" for kind, number in left_out.most_common())
        said += f"; left out: {reasons}; the first: {first[left_out.most_common(1)[0][0]]}"
    return said


def span_of(arrivals_s: Sequence[float]) -> str:
    """Return a log's span and rate, and its begin and end if its times are dates."""
    first_s, last_s = min(arrivals_s), max(arrivals_s)
    rate = f", {len(arrivals_s) / (last_s - first_s):.3g} requests/s" if last_s > first_s else ""
    dates = ""
    if first_s >= FIRST_S and last_s <= LAST_S:
        begin, end = (datetime.fromtimestamp(at_s, UTC) for at_s in (first_s, last_s))
        dates = f", {begin:%Y-%m-%d %H:%M:%S} to {end:%Y-%m-%d %H:%M:%S} UTC"
    return f"{len(arrivals_s)} requests of {last_s - first_s:.4g} s{rate}{dates}"


def cautions_of_times(arrivals_s: Sequence[float], *, is_ordered: bool) -> list[str]:
    """Return doubts about arrivals. is_ordered: whether rows should come in order of time."""
    times = np.asarray(arrivals_s, dtype=float)
    if times.size < 2:
        return []
    span_s = float(times.max() - times.min())
    if span_s == 0.0:
        return [
            "all requests arrive at once: if that is wrong, its times are missing, or in another "
            "field"
        ]
    found, rate = [], times.size / span_s
    if times.size >= _LEAST_REQUESTS:
        is_slow = rate < _LEAST_RATE and span_s > _LONG_S
        if is_slow or rate > MOST_RATE:
            found.append(
                f"{times.size} requests in {span_s:.3g} s are {rate:.2g} requests/s: if that is "
                "wrong, set the unit of its times with --time-unit"
            )
        low, high = np.percentile(times, [1, 99])
        if span_s > _FAR * (high - low) > 0:
            found.append(
                f"some times lie far from the others: the log spans {span_s:.3g} s, but its middle "
                f"98 % only {high - low:.3g} s"
            )
        if is_ordered and _rank_correlation(times) < _LEAST_ORDER:
            found.append(
                "its rows are not in order of arrival: check the field that is read as the arrival"
            )
    return found


def cautions_of_lengths(output_tokens: Sequence[int], num_cut: int) -> list[str]:
    """Return a doubt if a cap has cut most answers. num_cut: answers that are known to be cut."""
    num_answers = len(output_tokens)
    if num_answers < _LEAST_REQUESTS:
        return []
    longest = max(output_tokens)
    num_longest = sum(length == longest for length in output_tokens)
    if max(num_longest, num_cut) < _SAME_SHARE * num_answers:
        return []
    are = f"{num_longest} of {num_answers} answers have {longest} tokens"
    if num_cut > num_longest:
        are = f"{num_cut} of {num_answers} answers are cut by their cap or client"
    return [f"{are}: their full lengths are unknown, so they cannot show how good predictions are"]


def _rank_correlation(times: NDArray[np.float64]) -> float:
    """Return the rank correlation of places in the log with times, without its sign: newest first
    is an order too."""
    ranks = np.argsort(np.argsort(times, kind="stable"), kind="stable")
    return abs(float(np.corrcoef(ranks, np.arange(times.size))[0, 1]))
