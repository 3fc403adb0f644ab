"""Makes one traffic for systems with different aims: deadlines, levels of urgency, best effort."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.simulator.request import SimRequest
from bench.workloads.prompt_source import Prompts
from bench.workloads.source import Draw
from bench.workloads.triage import SHARES
from sage_sched.job import Hints
from sage_sched.slo import SloClass, SloConfig

# The prompts of levels 1 to 4, and of best effort.
_ASKED, _BEST_EFFORT = ("instruction", "chat", "writing"), ("summarization",)
# From abstracts to whole papers.
_PAPER = 16


class Levels(Prompts):
    """Requests of levels 1 (most urgent) to 5, which are their classes, with triage's shares.

    Levels 1 to 4 have deadlines, and levels 1 and 2 count twice. Levels do not depend on lengths.
    Level 5 is best effort without deadlines: summaries of long documents.
    """

    def __init__(
        self, data: Path | None, *, ttft_slo_ms: float = 2000.0, tpot_slo_ms: float = 100.0
    ) -> None:
        super().__init__(data, "levels")
        self._hints = [
            Hints(urgency=5)
            if level == 5
            else Hints(
                urgency=level,
                weight=2.0 if level <= 2 else 1.0,
                ttft_slo_ms=ttft_slo_ms,
                tpot_slo_ms=tpot_slo_ms,
                slo_class=f"{level}",
            )
            for level in range(1, 6)
        ]

    def requests(self, draw: Draw) -> list[SimRequest]:
        return self._of_levels(super().requests, draw)

    def for_servers(self, draw: Draw) -> list[SimRequest]:
        return self._of_levels(super().for_servers, draw)

    def _of_levels(
        self, requests_of: Callable[[Draw], list[SimRequest]], draw: Draw
    ) -> list[SimRequest]:
        rng, arrivals_s = np.random.default_rng([draw.seed, 23]), draw.arrivals_s
        levels = rng.choice(5, len(arrivals_s), p=SHARES) + 1
        made: dict[int, SimRequest] = {}
        for kinds, factor, here in (
            (_ASKED, 1, np.flatnonzero(levels < 5)),
            (_BEST_EFFORT, _PAPER, np.flatnonzero(levels == 5)),
        ):
            self._classes, self._factor = kinds, factor
            # Servers may get fewer, as no prompt is repeated.
            drawn = requests_of(draw._replace(arrivals_s=arrivals_s[here]))
            made |= dict(zip(here.tolist(), drawn, strict=False))
        return [
            replace(made[i], class_name=f"{level}", hints=self._hints[level - 1])
            for i, level in enumerate(levels.tolist())
            if i in made
        ]

    def slo(self) -> SloConfig:
        return SloConfig(
            trust="body",
            classes={
                f"{level}": SloClass(
                    priority=1 + len(SHARES) - level,
                    weight=hints.weight,
                    ttft_slo_ms=hints.ttft_slo_ms or math.inf,
                    tpot_slo_ms=hints.tpot_slo_ms or math.inf,
                    urgency=level,
                )
                for level, hints in enumerate(self._hints, 1)
            },
        )

    def priority_of(self, request: SimRequest) -> int:
        return self.slo().classes[request.class_name].priority
