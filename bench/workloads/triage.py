"""Makes requests with levels of urgency, which an expert, a nurse or others have set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.simulator.request import SimRequest
from bench.workloads.datasets import rows_with
from bench.workloads.source import Draw, Source
from bench.workloads.supposed import USUAL_GAIN, Supposed
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY, Hints

LABELS, LENGTHS = "urgency_ktas.jsonl.gz", "semsched_priority_lengths.jsonl.gz"
# The shares of levels 1 to 5 among requests.
SHARES = (0.10, 0.20, 0.30, 0.25, 0.15)


class Urgent(Source):
    """Triage prompts with levels of urgency from the source that Arm.said_by names. Their lengths
    do not depend on the levels, and are predicted as well as usual. Their classes are the expert's
    levels, "1" to "5"."""

    def __init__(self, data: Path, gain: float = USUAL_GAIN) -> None:
        """Read the lengths from the logs of Semantic Scheduling; half of them are the history of
        servers, and the other half is for evaluation. Raises WorkloadError if there are no logs.

        gain: of the predictions, see Supposed.
        """
        self._gain = gain
        labelled = rows_with(data / LABELS, "prompt", "urgency_ktas", "urgency_nurse")
        expert = [int(row["urgency_ktas"]) for row in labelled]
        nurse = [int(row["urgency_nurse"]) for row in labelled]
        self._said = {"expert": np.array(expert), "nurse": np.array(nurse)}
        rows = rows_with(data / LENGTHS, "prompt_len", "output_len")
        logged = np.array([(int(row["prompt_len"]), int(row["output_len"])) for row in rows])
        lengths = np.random.default_rng(0).permutation(np.maximum(logged, 1))
        self.history, self.lengths = lengths[: len(lengths) // 2, 1], lengths[len(lengths) // 2 :]

    def requests(self, draw: Draw) -> list[SimRequest]:
        drawn = self._drawn(draw.number, draw.seed)
        rng = np.random.default_rng([draw.seed, 13])
        lengths = self.lengths[rng.integers(len(self.lengths), size=draw.number)]
        predictions = Supposed(lengths[:, 1].tolist()).predictions(self._gain, draw.seed)
        return [
            SimRequest(
                arrival_s=float(arrival_s),
                input_tokens=int(input_tokens),
                output_tokens=int(output_tokens),
                max_new_tokens=draw.cap,
                distribution=distribution,
                class_name=str(true_level),
                hints=Hints(urgency=level),
            )
            for level, true_level, arrival_s, distribution, (input_tokens, output_tokens) in zip(
                self._levels(draw.arm.said_by, drawn, draw.seed),
                self._said["expert"][drawn].tolist(),
                draw.arrivals_s,
                predictions,
                lengths.tolist(),
                strict=True,
            )
        ]

    def all_answers(self) -> LengthDistribution:
        return LengthDistribution.from_samples(self.history, "warm")

    def _drawn(self, num_requests: int, seed: int) -> NDArray[np.int64]:
        """Return numbers of prompts whose expert levels have SHARES."""
        rng = np.random.default_rng([seed, 11])
        levels = rng.choice(5, num_requests, p=SHARES) + 1
        by_level = [np.flatnonzero(self._said["expert"] == level) for level in range(1, 6)]
        return np.array([rng.choice(by_level[level - 1]) for level in levels.tolist()])

    def _levels(self, who: str, drawn: NDArray[np.int64], seed: int) -> list[int]:
        """Return the levels by `who`: the expert, the nurse, "nobody" (all alike) or
        pure chance. With "expert, 0.3 wrong", three in ten of the expert's levels become any of the
        other four."""
        if who == "nobody":
            return [DEFAULT_URGENCY] * len(drawn)
        if who == "chance":
            shuffled = np.random.default_rng([seed, 17]).permutation(self._said["expert"][drawn])
            return [int(level) for level in shuffled]
        who, _, errors = who.partition(", ")
        levels = self._said[who][drawn]
        rng = np.random.default_rng([seed, 19])
        is_wrong = rng.random(len(drawn)) < float(errors.removesuffix(" wrong") or 0)
        others = (levels - 1 + rng.integers(1, 5, len(drawn))) % 5 + 1
        return [int(level) for level in np.where(is_wrong, others, levels)]
