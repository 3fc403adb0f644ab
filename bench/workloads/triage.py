"""Requests with levels of urgency, and who says which level one is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.request import SimRequest
from bench.experiment.spec import Arm
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Purpose, Source
from predictor_store.data.files import raw_rows
from predictor_store.urgency.head import UNDER_COST, fit
from sage_sched.distribution import LengthDistribution
from sage_sched.job import DEFAULT_URGENCY, Hints

LABELS, LENGTHS = "urgency_ktas.jsonl.gz", "semsched_priority_lengths.jsonl.gz"
# Of the levels 1 to 5, as requests have them.
SHARES = (0.10, 0.20, 0.30, 0.25, 0.15)


@dataclass(frozen=True, slots=True)
class Triage:
    """Prompts with levels of urgency 1 to 5, and lengths that do not depend on them.

    expert, nurse, model: the level of each prompt, as these say it, shape (prompts,); the model is
        trained on the other four fifths each time. lengths: (input tokens, answer
    tokens), shape (lengths, 2). history: answers by which these are foreseen, none of them.
    """

    expert: NDArray[np.int64]
    nurse: NDArray[np.int64]
    model: NDArray[np.int64]
    lengths: NDArray[np.int64]
    history: NDArray[np.int64]

    def drawn(self, num_requests: int, seed: int) -> NDArray[np.int64]:
        """Numbers of prompts whose expert levels have SHARES."""
        rng = np.random.default_rng([seed, 11])
        levels = rng.choice(5, num_requests, p=SHARES) + 1
        by_level = [np.flatnonzero(self.expert == level) for level in range(1, 6)]
        return np.array([rng.choice(by_level[level - 1]) for level in levels.tolist()])

    def foreseen(self) -> LengthDistribution:
        """Of every answer: no prompt tells its length."""
        return LengthDistribution.from_samples(self.history, "warm")

    def requests(
        self,
        drawn: NDArray[np.int64],
        levels: Sequence[int],
        arrivals_s: NDArray[np.float64],
        seed: int,
        cap: int,
    ) -> list[SimRequest]:
        """One for each arrival, of the levels that somebody says they are of. Their classes are the
        expert's levels, "1" to "5"."""
        rng = np.random.default_rng([seed, 13])
        lengths = self.lengths[rng.integers(len(self.lengths), size=len(arrivals_s))]
        foreseen = self.foreseen()
        return [
            SimRequest(
                arrival_s=float(arrival_s),
                input_tokens=int(input_tokens),
                output_tokens=int(output_tokens),
                max_new_tokens=cap,
                distribution=foreseen,
                class_name=str(true_level),
                hints=Hints(urgency=level),
            )
            for level, true_level, arrival_s, (input_tokens, output_tokens) in zip(
                levels, self.expert[drawn].tolist(), arrivals_s, lengths.tolist(), strict=True
            )
        ]


class Urgent(Source):
    """Requests of triage, as urgent as somebody says (Arm.said_by)."""

    def __init__(self, data: Path) -> None:
        self._triage = read_triage(data)

    @property
    def description(self) -> str:
        return "triage prompts with an expert's levels; lengths recorded elsewhere, drawn"

    def requests(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        drawn = self._triage.drawn(len(arrivals_s), seed)
        levels = said_by(arm.said_by, self._triage, drawn, seed)
        return self._triage.requests(drawn, levels, arrivals_s, seed, cap)

    def all_answers(self) -> LengthDistribution:
        return self._triage.foreseen()


def said_by(who: str, triage: Triage, drawn: NDArray[np.int64], seed: int) -> list[int]:
    """The level of each request, as the expert, the nurse, the model, nobody or pure chance says
    it."""
    if who == "nobody":
        return [DEFAULT_URGENCY] * len(drawn)
    if who == "chance":
        shuffled = np.random.default_rng([seed, 17]).permutation(triage.expert[drawn])
        return [int(level) for level in shuffled]
    levels = {"expert": triage.expert, "nurse": triage.nurse, "model": triage.model}[who]
    return [int(level) for level in levels[drawn]]


def read_triage(folder: Path) -> Triage:
    """Half of the lengths foretells the other half. Raises WorkloadError where there are none."""
    labelled = rows_with(folder / LABELS, "prompt", "urgency_ktas", "urgency_nurse")
    if not labelled:
        raise WorkloadError(f"{folder} has no {LABELS} with rows")
    expert = [int(row["urgency_ktas"]) for row in labelled]
    lengths = np.random.default_rng(0).permutation(read_logged(folder)[:, 1:])
    half = len(lengths) // 2
    return Triage(
        expert=np.array(expert),
        nurse=np.array([int(row["urgency_nurse"]) for row in labelled]),
        model=fit([str(row["prompt"]) for row in labelled], expert, UNDER_COST)[1],
        lengths=lengths[half:],
        history=lengths[:half, 1],
    )


def read_logged(folder: Path) -> NDArray[np.int64]:
    """Of each request in the logs of Semantic Scheduling: how urgent, 0 (most) to 4, and its tokens
    in and out, each at least 1; shape (requests, 3). Raises WorkloadError where there are none."""
    fields = ("priority", "prompt_len", "output_len")
    rows = [[int(row[field]) for field in fields] for row in rows_with(folder / LENGTHS, *fields)]
    if len(rows) < 2:
        raise WorkloadError(f"{folder} has no {LENGTHS} with rows")
    return np.maximum(np.array(rows, np.int64), [0, 1, 1])


def rows_with(path: Path, *fields: str) -> list[dict[str, Any]]:
    """Those that have these fields."""
    rows = [row for _, row in raw_rows(str(path)) if isinstance(row, dict)]
    return [row for row in rows if all(row.get(field) is not None for field in fields)]
