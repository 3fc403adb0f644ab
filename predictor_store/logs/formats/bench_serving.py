"""Reads runs of SGLang's bench_serving and `vllm bench serve`, one row per run with a list for each
measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row
from predictor_store.logs.format import Context, Reader
from predictor_store.logs.request import LoggedRequest

_LISTS = (
    "input_lens", "output_lens", "errors", "start_times", "ttfts", "itls", "generated_texts",
)  # fmt: skip
# The field that a record gets for an arrival drawn at one request per second.
_AT_RATE_1 = "sage_at_rate_1"


def _records(run: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each request of a run with its own element of each list."""
    names = [name for name in _LISTS if isinstance(run.get(name), list)]
    number = len(run["input_lens"]) if "input_lens" in names else 0
    if not number or "output_lens" not in names:
        yield run
        return
    names = [name for name in names if len(run[name]) == number]
    of_run = {name: value for name, value in run.items() if name not in _LISTS}
    gaps = np.random.default_rng([0, 1]).exponential(1.0, number)
    for i, at in enumerate((np.cumsum(gaps) - gaps[:1]).tolist()):
        yield {**of_run, _AT_RATE_1: at, **{name: run[name][i] for name in names}}


def _read(row: Row, context: Context) -> LoggedRequest:
    if _AT_RATE_1 not in row.data:
        raise RowError(
            "without lengths",
            "run bench_serving with --output-details, vllm bench serve with --save-detailed",
        )
    output_tokens = row.tokens("output", "output_lens")
    if row.data.get("errors") or not output_tokens:
        raise RowError("that failed", str(row.data.get("errors"))[:80])
    ttft, itls = row.data.get("ttfts"), row.data.get("itls")
    return LoggedRequest(
        arrival=_arrival(row, context),
        input_tokens=row.tokens("input", "input_lens"),
        output_tokens=output_tokens,
        output=row.data.get("generated_texts"),
        # These tools cap each request at the length that it is to have.
        cap_tokens=output_tokens,
        ttlt_s=None if ttft is None or itls is None else float(ttft) + math.fsum(itls),
    )


def _arrival(row: Row, context: Context) -> float:
    if (start := row.find("arrival", "start_times")) is not None:
        return context.clock.read(start, "s")
    rate = row.data.get("request_rate")
    rate_s = float(rate) if isinstance(rate, int | float | str) and rate != "trace" else math.nan
    if not rate_s > 0:
        raise RowError("without arrivals", f"its request_rate is {rate!r}, allowed: above 0")
    if rate_s == math.inf and row.data.get("max_concurrency") is not None:
        raise RowError(
            "without arrivals",
            "it ran with --max-concurrency and no --request-rate, so each request waited for an "
            "answer to end",
        )
    row.used("arrival", "request_rate")
    context.notes.add("arrivals are drawn at the run's request rate: it does not record them")
    return context.clock.read(row.data[_AT_RATE_1] / rate_s, "s")


READER = Reader(_read, records=_records)
