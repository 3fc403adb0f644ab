"""Requests by their lengths alone, with deadlines: recorded ones, foreseen by others of the same
recording. A third of it foresees, a third is for tuning, a third is reported on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.request import SimRequest
from bench.experiment.spec import Arm
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Purpose, Source
from predictor_store.data.files import DatasetError, RowError, raw_rows
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints
from sage_sched.slo import SloClass, SloConfig

# Of a recording: its file, its fields, and by what lengths are divided, so that one fits a pool of
# 72,000 tokens some dozens of times.
RECORDINGS = {
    "azure": ("trace_azure2023_conv.jsonl.gz", "input_tokens", "output_tokens", 1),
    "sharegpt": ("sharegpt_prompts.jsonl.gz", "prompt_tokens", "output_tokens", 1),
    "mooncake": ("trace_mooncake_synthetic.jsonl.gz", "input_tokens", "output_tokens", 8),
}
_MOST_INPUT, _MOST_OUTPUT = 8192, 2048
# So many requests of the nearest input length make a prediction.
_NUM_ALIKE = 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """input_tokens, output_tokens: of each request, shape (requests,). history: those by which
    these are foreseen, and none of them."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    history: tuple[NDArray[np.int64], NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.input_tokens)

    def foreseen(self, index: int) -> LengthDistribution:
        """The answers of the requests of nearest input length."""
        inputs, outputs = self.history
        near = np.argsort(np.abs(inputs - self.input_tokens[index]), kind="stable")
        return LengthDistribution.from_samples(outputs[near[:_NUM_ALIKE]], "warm")

    @property
    def first_token_weight(self) -> float:
        """Mean input over mean output (ProServe, section 5.1), of the history."""
        inputs, outputs = self.history
        return float(inputs.mean() / outputs.mean())


def read_lengths(folder: Path, name: str, *, held_out: bool) -> Lengths:
    """Of one of RECORDINGS: a third foresees, a third is for tuning, a third is held out. Raises
    WorkloadError where there is none."""
    file, input_field, output_field, divisor = RECORDINGS[name]
    try:
        found = [row for _, row in raw_rows(str(folder / file))]
    except DatasetError as error:
        raise WorkloadError(str(error)) from error
    rows = []
    for row in found:
        if isinstance(row, RowError) or not isinstance(row, dict):
            continue
        tokens, answer = row.get(input_field), row.get(output_field)
        if isinstance(tokens, int) and isinstance(answer, int) and answer > 0:
            rows.append((max(1, tokens // divisor), max(1, answer // divisor)))
    if len(rows) < 3:
        raise WorkloadError(f"{folder / file} has no lengths")
    order = np.random.default_rng(0).permutation(len(rows))
    lengths = np.array(rows, np.int64)[order]
    lengths = np.minimum(lengths, [_MOST_INPUT, _MOST_OUTPUT])
    third = len(rows) // 3
    history, tuning, reported = lengths[:third], lengths[third : 2 * third], lengths[2 * third :]
    inputs, outputs = (reported if held_out else tuning).T
    return Lengths(inputs, outputs, (history[:, 0], history[:, 1]))


class Promised(Source):
    """Requests of classes of different weights, drawn with equal shares, all with deadlines."""

    def __init__(
        self,
        data: Path,
        recording: str,
        *,
        weights: Sequence[float] = (2.0, 1.0),
        ttft_slo_ms: float = 1000.0,
        tpot_slo_ms: float = 100.0,
    ) -> None:
        self._recording = recording
        self._lengths = read_lengths(data, recording, held_out=True)
        self._tuning = read_lengths(data, recording, held_out=False)
        self._weights = weights
        self._slo_ms = ttft_slo_ms, tpot_slo_ms

    @property
    def description(self) -> str:
        lengths, (ttft_ms, tpot_ms) = self._lengths, self._slo_ms
        return (
            f"{self._recording}: recorded lengths, {lengths.input_tokens.mean():.0f} tokens in and "
            f"{lengths.output_tokens.mean():.0f} out on average; TTFT {ttft_ms:g} ms, TPOT "
            f"{tpot_ms:g} ms; classes drawn"
        )

    def requests(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        lengths = self._tuning if purpose == Purpose.TUNING else self._lengths
        rng = np.random.default_rng([seed, 7])
        drawn = rng.integers(len(lengths), size=len(arrivals_s)).tolist()
        classes = rng.integers(len(self._weights), size=len(arrivals_s)).tolist()
        ttft_ms, tpot_ms = self._slo_ms
        return [
            SimRequest(
                arrival_s=float(at),
                input_tokens=int(lengths.input_tokens[index]),
                output_tokens=min(cap, int(lengths.output_tokens[index])),
                max_new_tokens=cap,
                distribution=lengths.foreseen(index),
                class_name=_class_name(self._weights[of_class]),
                hints=Hints(
                    weight=self._weights[of_class],
                    ttft_slo_ms=ttft_ms,
                    tpot_slo_ms=tpot_ms,
                    slo_class=_class_name(self._weights[of_class]),
                    first_token_weight=lengths.first_token_weight,
                ),
            )
            for at, index, of_class in zip(arrivals_s, drawn, classes, strict=True)
        ]

    def all_answers(self) -> LengthDistribution:
        return LengthDistribution.from_samples(self._lengths.history[1], "warm").compressed(64)

    def slo(self) -> SloConfig:
        ttft_ms, tpot_ms = self._slo_ms
        return SloConfig(
            trust="body",
            first_token_weight=self._lengths.first_token_weight,
            classes={
                _class_name(weight): SloClass(
                    priority=priority, weight=weight, ttft_slo_ms=ttft_ms, tpot_slo_ms=tpot_ms
                )
                for priority, weight in enumerate(sorted(self._weights), 1)
            },
        )

    def priority_of(self, request: SimRequest) -> int:
        return 1 + sorted(self._weights).index(request.hints.weight)


def _class_name(weight: float) -> str:
    return f"w{weight:g}"
