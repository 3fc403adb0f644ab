"""A trace in Mooncake's format: JSON lines of requests whose prompts are told by blocks.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [block, ...]}`, as
Mooncake publishes them (Qin et al., FAST 2025) and aiperf reads and writes them; a `session_id` is
read too. A block stands for itself and all before it, so that two prompts share what they begin
with alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.engines.simulator.presets import Engine
from bench.engines.simulator.radix_tree import cut
from bench.engines.simulator.request import SimRequest
from bench.experiment.spec import Arm
from bench.workloads.agents import spread_of
from bench.workloads.prompts import WorkloadError
from bench.workloads.source import Purpose, Source
from predictor_store.data.files import DatasetError, RowError, raw_rows
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Hints

BLOCK_TOKENS = 512
# Streams of tokens that nobody shares; a block's number is its stream.
_FIRST_OWN_STREAM = -(1 << 60)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a trace. blocks: of its prompt, the last of which need not be full."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str


def read_mooncake(path: Path) -> list[Recorded]:
    """Its requests, in order of arrival. Raises WorkloadError, which names the row."""
    try:
        trace = [_recorded(place, row) for place, row in raw_rows(str(path))]
    except DatasetError as error:
        raise WorkloadError(str(error)) from error
    if not trace:
        raise WorkloadError(f"{path} holds no requests")
    return sorted(trace, key=lambda each: each.arrival_s)


def _recorded(place: str, row: Any) -> Recorded:
    if isinstance(row, RowError):
        raise WorkloadError(f"{place}: {row}")
    try:
        return recorded(row)
    except ValueError as error:
        raise WorkloadError(f"{place} {error}") from error


def recorded(row: Any) -> Recorded:
    """One row. Raises ValueError, which says what is wrong with it."""
    try:
        arrival_s, blocks = float(row["timestamp"]) / 1e3, tuple(map(int, row["hash_ids"]))
        input_tokens, output_tokens = int(row["input_length"]), int(row["output_length"])
        session = str(row.get("session_id", ""))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"is no request of a Mooncake trace: {error!r}") from error
    if not 0 <= arrival_s < math.inf or min(input_tokens, output_tokens) < 1:
        allowed = "timestamp from 0, input_length and output_length from 1"
        raise ValueError(f"has a field that is out of range, allowed: {allowed}")
    return Recorded(arrival_s, input_tokens, output_tokens, blocks, session)


def requests_of_trace(
    trace: Sequence[Recorded],
    *,
    factor: float,
    speed: float,
    foreseen: LengthDistribution | None,
    cap_tokens: int = 4096,
) -> list[SimRequest]:
    """They come so many times as fast as recorded, all token counts divided by the factor.

    foreseen: of every answer. A request of no session is one by itself.
    """
    block_tokens = max(1, round(BLOCK_TOKENS / factor))
    requests = []
    for number, each in enumerate(trace):
        input_tokens = max(1, round(each.input_tokens / factor))
        spans = cut([(block, 0, block_tokens) for block in each.blocks], input_tokens)
        if rest_tokens := input_tokens - sum(end for _, _, end in spans):
            spans.append((_FIRST_OWN_STREAM + number, 0, rest_tokens))
        requests.append(
            SimRequest(
                arrival_s=(each.arrival_s - trace[0].arrival_s) / speed,
                input_tokens=input_tokens,
                output_tokens=min(max(1, round(each.output_tokens / factor)), cap_tokens),
                max_new_tokens=cap_tokens,
                distribution=foreseen,
                class_name="trace",
                spans=tuple(spans),
                hints=Hints(session=each.session or f"request {number}"),
            )
        )
    return requests


class MooncakeTrace(Source):
    """A trace of your own, `rate` times as fast as recorded. Its first tenth foresees the rest."""

    recorded = True

    def __init__(self, trace: Path, engine: Engine, shrink: float) -> None:
        found = read_mooncake(trace)
        num_first = max(1, len(found) // 10)
        if len(found) <= num_first:
            raise WorkloadError(f"{trace} holds {len(found)} requests, allowed: 2 or more")
        longest = max(each.input_tokens for each in found)
        self._factor = max(shrink, longest / (engine.kv_pool_tokens / 2))
        lengths = [each.output_tokens / self._factor for each in found[:num_first]]
        self._foreseen = spread_of(lengths)
        self._trace = found[num_first:]
        self._name = trace.name

    @property
    def description(self) -> str:
        return (
            f"{len(self._trace)} requests of {self._name}, token counts divided by "
            f"{self._factor:.1f}; all answers are foreseen alike"
        )

    def requests(
        self, arm: Arm, arrivals_s: NDArray[np.float64], seed: int, cap: int, purpose: Purpose
    ) -> list[SimRequest]:
        """All of the trace's: arrivals_s holds how many times as fast as recorded they come."""
        return requests_of_trace(
            self._trace,
            factor=self._factor,
            speed=float(arrivals_s[0]),
            foreseen=self._foreseen,
            cap_tokens=cap,
        )

    def all_answers(self) -> LengthDistribution:
        return self._foreseen
