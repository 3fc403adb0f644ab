"""Math and code prompts with answers as long as a reasoning model's, from a folder of datasets.

No reasoning model's answers come with these prompts. So each answer has the length that published
traffic of one (ServeGen's deepseek-r1: quantiles per client and time of day) has at the rank which
LENGTH_MODEL's own answer to that very prompt has among its answers. What a prompt says of its
answer's length is thereby what it said of that model's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.workloads.datasets import rows_of
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest, stable_hash

LENGTH_MODEL = "Meta-Llama-3.1-8B-Instruct"
# The levels at which ServeGen gives quantiles, and an end for the tail: twice its last quantile.
_LEVELS = np.array([0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99])
_LONGEST = 2.0


def load(folder: Path) -> Workload:
    """The workload above. Raises WorkloadError, naming file and row, where one is unusable."""
    own = {
        row["prompt"]: row["output_tokens"]
        for row in rows_of(folder, "math_code_reasoning", prompt=str, model=str, output_tokens=int)
        if row["model"] == LENGTH_MODEL
    }
    if not own:
        raise WorkloadError(f"the data folder has no answers of {LENGTH_MODEL}")
    levels, lengths = _quantiles(folder)
    # Ties, as there are many, go by the prompt's hash.
    ranked = sorted(own, key=lambda prompt: (own[prompt], stable_hash("rank of " + prompt)))
    ranks = (np.arange(len(ranked)) + 0.5) / len(ranked)
    answers = np.exp(np.interp(ranks, levels, np.log(lengths))).astype(int).tolist()
    requests = [
        WorkloadRequest(prompt, length, "reasoning")
        for prompt, length in zip(ranked, answers, strict=True)
    ]
    return Workload.split(
        requests,
        "real math and code prompts; lengths with the quantiles of a reasoning model's published "
        f"traffic (deepseek-r1), by the rank of {LENGTH_MODEL}'s own answer to the prompt",
    )


def _quantiles(folder: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Levels and lengths: the mean of all clients and times of day, each counting alike."""
    rows = [
        row["output"]
        for row in rows_of(folder, "servegen_r1_length_quantiles", source=str)
        if row.get("output")
    ]
    if not rows:
        raise WorkloadError("servegen_r1_length_quantiles has no quantiles of outputs")
    quantiles = np.array([row["q"] for row in rows])
    lengths = quantiles.mean(axis=0)
    ends = [lengths[0] / _LONGEST, *lengths, lengths[-1] * _LONGEST]
    return np.array([0.0, *_LEVELS, 1.0]), np.array(ends)
