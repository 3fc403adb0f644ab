"""Rows that are a request each: CSV or JSON lines of arrival, input and output tokens, Mooncake's
traces, what a server in shadow mode wrote down; and bench_serving's, which are a run each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from bench.whatif.log import Logged, blocks_of
from bench.workloads.arrivals import poisson_arrivals
from sage_sched.distribution import LengthDistribution

TABLE, MOONCAKE, SHADOW = "rows of a table", "rows of Mooncake's", "rows of a shadow record"
BENCH_SERVING = "requests of bench_serving"
_MOONCAKE_BLOCK_TOKENS = 512
# The first that a row has counts; upper and lower case are alike.
ARRIVAL = ("arrival_s", "arrival", "timestamp", "time", "t")
INPUT = ("input_tokens", "prompt_tokens", "input_len", "input_length", "contexttokens", "input")
OUTPUT = (
    "output_tokens", "completion_tokens", "output_len", "output_length", "generatedtokens",
    "output",
)  # fmt: skip
CAP = ("max_new_tokens", "max_tokens", "max_completion_tokens")
TTLT = ("ttlt_s", "e2e_latency", "e2e_latency_s", "latency_s")
PROMPT = ("prompt", "text")


def is_header(line: str) -> bool:
    """Whether it is the first line of a CSV file, and names columns that are known."""
    names = {name.strip(' "').lower() for name in line.strip().split(",")}
    return len(names) > 1 and not names.isdisjoint((*ARRIVAL, *INPUT, *OUTPUT))


def kind_of(row: Mapping[str, Any]) -> str:
    """What a row is, by the fields that it has."""
    if "input_lens" in row or "mean_e2e_latency_ms" in row:
        return BENCH_SERVING
    if "hash_ids" in row:
        return MOONCAKE
    return SHADOW if "prediction" in row else TABLE


def request_of(row: Mapping[str, Any], kind: str) -> Logged:
    """Raises ValueError, KeyError or TypeError, which says what is missing."""
    if kind == MOONCAKE:  # Qin et al., FAST 2025; aiperf reads and writes them too
        return Logged(
            float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]),
            blocks=tuple(map(int, row["hash_ids"])), block_tokens=_MOONCAKE_BLOCK_TOKENS,
        )  # fmt: skip
    fields = {str(name).strip().lower(): value for name, value in row.items()}
    prompt = _found(fields, PROMPT)
    text = prompt if isinstance(prompt, str) else ""
    blocks, block_tokens = blocks_of(text)
    cap, ttlt = _found(fields, CAP), _found(fields, TTLT)
    forecast = fields.get("prediction")
    return Logged(
        arrival_s=_seconds(_needed(fields, ARRIVAL)),
        input_tokens=_whole(_needed(fields, INPUT)),
        output_tokens=_whole(_needed(fields, OUTPUT)),
        cap_tokens=None if cap is None else _whole(cap),
        is_cut=fields.get("is_cut") is True,
        prompt=text,
        blocks=blocks,
        block_tokens=block_tokens,
        ttlt_s=None if ttlt is None else float(ttlt),
        forecast=None if forecast is None else LengthDistribution.from_fields(forecast),
    )


def requests_of_run(row: Mapping[str, Any]) -> Iterator[Logged]:
    """Of a line of bench_serving (sglang/benchmark/serving.py), which keeps lengths, not arrivals:
    they are drawn anew, Poisson at its request rate, or all at once if that is without bound.
    Raises ValueError."""
    if "input_lens" not in row:
        raise ValueError("it has no lengths; run bench_serving with --output-details")
    rate = row.get("request_rate")
    rate_s = float(rate) if isinstance(rate, int | float | str) and rate != "trace" else math.nan
    if not rate_s > 0:
        raise ValueError(f"its request_rate is {rate!r}, allowed: a number above 0")
    if rate_s == math.inf and row.get("max_concurrency") is not None:
        raise ValueError(
            "it ran with --max-concurrency and no --request-rate, so that requests came as answers "
            "ended: that is no log of arrivals"
        )
    answered = [i for i, error in enumerate(row.get("errors", ())) if not error]
    arrivals_s = poisson_arrivals(len(answered), seed=0) / rate_s
    for arrival_s, i in zip(arrivals_s.tolist(), answered, strict=True):
        output_tokens = int(row["output_lens"][i])
        passed_s = float(row["ttfts"][i]) + math.fsum(row["itls"][i])
        yield Logged(
            arrival_s, int(row["input_lens"][i]), output_tokens,
            # Its requests name the length that they want as their cap.
            cap_tokens=output_tokens, ttlt_s=passed_s,
        )  # fmt: skip


def _found(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in (None, "")), None)


def _needed(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    value = _found(fields, names)
    if value is None:
        raise ValueError(f"it has none of the fields {', '.join(names)}")
    return value


def _whole(value: Any) -> int:
    number = float(value)
    if number != number // 1:
        raise ValueError(f"{value!r} is no whole number of tokens")
    return int(number)


def _seconds(value: Any) -> float:
    """A number of seconds, or a date and time."""
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(str(value).strip()[:26]).timestamp()
