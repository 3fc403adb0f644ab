"""Reads runs of SGLang's bench_serving and `vllm bench serve`, one row per run with a list for each
measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from predictor_store.logs.errors import RowError
from predictor_store.logs.fields import Row, whole
from predictor_store.logs.format import Context, Format
from predictor_store.logs.request import LoggedRequest


def _is_run(row: Mapping[str, Any]) -> bool:
    return "input_lens" in row or "mean_e2e_latency_ms" in row or "mean_ttft_ms" in row


def _read(row: Row, context: Context) -> Iterator[LoggedRequest]:
    run = row.data
    if "input_lens" not in run or "output_lens" not in run:
        raise RowError(
            "without lengths",
            "run bench_serving with --output-details, vllm bench serve with --save-detailed",
        )
    errors = run.get("errors") or [""] * len(run["input_lens"])
    answered = [i for i, error in enumerate(errors) if not error and run["output_lens"][i]]
    if failed := len(errors) - len(answered):
        context.notes.add(f"{failed} requests of the run failed and are left out")
    row.used("input", "input_lens")
    row.used("output", "output_lens")
    ttfts, itls = run.get("ttfts"), run.get("itls")
    texts = run.get("generated_texts")
    for arrival, i in zip(_arrivals(row, context, answered), answered, strict=True):
        output_tokens = whole(run["output_lens"][i], "output_lens")
        yield LoggedRequest(
            arrival=arrival,
            input_tokens=whole(run["input_lens"][i], "input_lens"),
            output_tokens=output_tokens,
            output=texts[i] if texts else None,
            # These tools cap each request at the length that it is to have.
            cap_tokens=output_tokens,
            ttlt_s=float(ttfts[i]) + math.fsum(itls[i]) if ttfts and itls else None,
        )


def _arrivals(row: Row, context: Context, answered: list[int]) -> list[float]:
    run = row.data
    starts = run.get("start_times")
    if starts and len(starts) == len(run["input_lens"]):
        row.used("arrival", "start_times")
        return [context.clock.read(starts[i], "s") for i in answered]
    rate = run.get("request_rate")
    rate_s = float(rate) if isinstance(rate, int | float | str) and rate != "trace" else math.nan
    if not rate_s > 0:
        raise RowError("without arrivals", f"its request_rate is {rate!r}, allowed: above 0")
    if rate_s == math.inf and run.get("max_concurrency") is not None:
        raise RowError(
            "without arrivals",
            "it ran with --max-concurrency and no --request-rate, so each request waited for an "
            "answer to end",
        )
    row.used("arrival", "request_rate")
    context.notes.add("arrivals are drawn at the run's request rate: it does not record them")
    gaps = np.random.default_rng([0, 1]).exponential(1.0, len(answered))
    return [context.clock.read(at, "s") for at in ((np.cumsum(gaps) - gaps[:1]) / rate_s).tolist()]


FORMAT = Format(
    "bench-serving",
    "SGLang's `bench_serving --output-details`, `vllm bench serve --save-detailed`",
    '{"request_rate": 4.0, "input_lens": [5, 6], "output_lens": [2, 3], "ttfts": [0.1, 0.2], '
    '"itls": [[0.1], [0.1, 0.1]], "start_times": [0.0, 0.3], "errors": ["", ""]}',
    "lengths, arrivals by start_times or drawn at the request rate",
    _is_run,
    _read,
)
