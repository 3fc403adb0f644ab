"""Makes requests without text from recorded lengths, with deadlines. One third of a recording is
the history for predictions, one third is for tuning, and one third is for reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.simulator.request import SimRequest
from bench.workloads.datasets import rows_with
from bench.workloads.source import Draw, Purpose, Source
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.slo import SloClass, SloConfig

# For each recording: its file, its fields, and the divisor of its lengths. With these divisors a
# pool of 72,000 tokens holds a few dozen requests.
RECORDINGS = {
    "azure": ("trace_azure2023_conv.jsonl.gz", "input_tokens", "output_tokens", 1),
    "sharegpt": ("sharegpt_prompts.jsonl.gz", "prompt_tokens", "output_tokens", 1),
    "mooncake": ("trace_mooncake_synthetic.jsonl.gz", "input_tokens", "output_tokens", 8),
}
_MOST_INPUT, _MOST_OUTPUT = 8192, 2048
# A prediction uses this many past requests, the ones with the nearest input lengths.
_NUM_ALIKE = 64


def read_lengths(folder: Path, name: str) -> list[NDArray[np.int64]]:
    """Return input and output tokens of one of RECORDINGS, shape (requests, 2): a third for
    predictions, one for tuning, and one for reports. Raises WorkloadError if it is absent."""
    file, input_field, output_field, divisor = RECORDINGS[name]
    rows = [
        (max(1, row[input_field] // divisor), max(1, row[output_field] // divisor))
        for row in rows_with(folder / file, input_field, output_field)
        if row[output_field] > 0
    ]
    order = np.random.default_rng(0).permutation(len(rows))
    lengths = np.array(rows, np.int64)[order]
    lengths = np.minimum(lengths, [_MOST_INPUT, _MOST_OUTPUT])
    third = len(rows) // 3
    return [lengths[:third], lengths[third : 2 * third], lengths[2 * third :]]


class WithDeadlines(Source):
    """Requests of classes with different weights, drawn with equal shares, all with deadlines."""

    def __init__(
        self,
        data: Path,
        recording: str,
        *,
        weights: Sequence[float] = (2.0, 1.0),
        ttft_slo_ms: float = 1000.0,
        tpot_slo_ms: float = 100.0,
    ) -> None:
        self._history, self._tuning, self._reported = read_lengths(data, recording)
        inputs, outputs = self._history.T
        # ProServe, section 5.1.
        self._first_token_weight = float(inputs.mean() / outputs.mean())
        self._weights = weights
        self._slo_ms = ttft_slo_ms, tpot_slo_ms

    def requests(self, draw: Draw) -> list[SimRequest]:
        lengths = self._tuning if draw.purpose == Purpose.TUNING else self._reported
        rng = np.random.default_rng([draw.seed, 7])
        drawn = rng.integers(len(lengths), size=draw.number).tolist()
        classes = rng.integers(len(self._weights), size=draw.number).tolist()
        ttft_ms, tpot_ms = self._slo_ms
        return [
            SimRequest(
                arrival_s=float(at),
                input_tokens=int(lengths[index, 0]),
                output_tokens=min(draw.cap, int(lengths[index, 1])),
                max_new_tokens=draw.cap,
                distribution=self._predicted(lengths[index, 0]),
                class_name=f"w{self._weights[of_class]:g}",
                hints=Hints(
                    weight=self._weights[of_class],
                    ttft_slo_ms=ttft_ms,
                    tpot_slo_ms=tpot_ms,
                    slo_class=f"w{self._weights[of_class]:g}",
                    first_token_weight=self._first_token_weight,
                ),
            )
            for at, index, of_class in zip(draw.arrivals_s, drawn, classes, strict=True)
        ]

    def _predicted(self, input_tokens: int) -> LengthDistribution:
        """Return the answer lengths of the requests with the nearest input lengths."""
        inputs, outputs = self._history.T
        near = np.argsort(np.abs(inputs - input_tokens), kind="stable")
        return LengthDistribution.from_samples(outputs[near[:_NUM_ALIKE]], "warm")

    def all_answers(self) -> LengthDistribution:
        return LengthDistribution.from_samples(self._history[:, 1], "warm").compressed(64)

    def slo(self) -> SloConfig:
        ttft_ms, tpot_ms = self._slo_ms
        return SloConfig(
            trust="body",
            first_token_weight=self._first_token_weight,
            classes={
                f"w{weight:g}": SloClass(
                    priority=priority, weight=weight, ttft_slo_ms=ttft_ms, tpot_slo_ms=tpot_ms
                )
                for priority, weight in enumerate(sorted(self._weights), 1)
            },
        )

    def priority_of(self, request: SimRequest) -> int:
        return 1 + sorted(self._weights).index(request.hints.weight)
