"""Makes a batch with a finish time beside online requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.simulator.request import SimRequest
from bench.workloads.prompt_source import Prompts
from bench.workloads.source import Draw, Purpose
from sage_sched.job import BatchPart

# The batch draws its prompts with another seed than the online requests.
_SEEDS = 100_000


class Beside(Prompts):
    """Online requests (class "online"), and a batch (class "batch") of the same kind or of other
    classes of prompts, which arrives all at once.

    of: a workload of prompts. num_batch: the batch's requests; 0: there is no batch.
    at_s: when it arrives. done_in_s: its finish time, from then on.
    batch_classes: the classes of its prompts; all by default.
    says: whether it is known as a batch. If not, its requests are like the online ones.
    """

    def __init__(
        self,
        data: Path | None,
        *,
        of: str = "mixed",
        num_batch: int = 0,
        at_s: float = 10.0,
        done_in_s: float = 300.0,
        batch_classes: tuple[str, ...] = (),
        says: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(data, of, **options)
        self._own_classes, self._batch_classes = self._classes, batch_classes
        self._at_s, self._number = at_s, num_batch
        part = BatchPart("batch", num_batch, done_in_s) if says and num_batch else None
        self._part = part

    def requests(self, draw: Draw) -> list[SimRequest]:
        return self._both(super().requests, draw)

    def for_servers(self, draw: Draw) -> list[SimRequest]:
        return self._both(super().for_servers, draw)

    def _both(
        self, requests_of: Callable[[Draw], list[SimRequest]], draw: Draw
    ) -> list[SimRequest]:
        self._classes = self._own_classes
        found = [replace(request, class_name="online") for request in requests_of(draw)]
        if draw.purpose != Purpose.CAPACITY and self._number:
            self._classes = self._batch_classes
            times_s = np.full(self._number, self._at_s)
            of_batch = draw._replace(arrivals_s=times_s, seed=draw.seed + _SEEDS)
            found += [
                replace(request, class_name="batch", batch=self._part)
                for request in requests_of(of_batch)
            ]
        return sorted(found, key=lambda request: request.arrival_s)
