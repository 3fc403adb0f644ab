"""Requests by their lengths alone: recorded ones, foreseen by others of the same recording."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.workloads.prompts import WorkloadError
from predictor_store.data.files import DatasetError, RowError, raw_rows
from sage_sched.distribution import LengthDistribution

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
