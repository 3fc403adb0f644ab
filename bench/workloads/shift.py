"""Makes traffic that changes: chat, then reasoning, then chat again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.simulator.request import SimRequest
from bench.workloads.prompt_source import Prompts
from bench.workloads.source import Draw, Purpose

# The class of each phase, in reports, and the class of its prompts. All phases last equally long.
_PHASES = {"chat": "chat", "reasoning": "reasoning", "chat again": "chat"}


class Shift(Prompts):
    """Requests of a server whose traffic changes twice. Its history has both kinds of prompts, as
    if the server had seen both before.

    slower: how many chat requests are as much work as a reasoning request. Reasoning requests come
        at this fraction of the rate, so that all phases are as heavy.
    """

    def __init__(self, data: Path | None, *, slower: float = 6.0) -> None:
        super().__init__(data, "shift")
        gaps = np.array([slower if kind == "reasoning" else 1.0 for kind in _PHASES.values()])
        self._shares = 1 / gaps / np.sum(1 / gaps)
        self._gaps = gaps / (self._shares @ gaps)

    def requests(self, draw: Draw) -> list[SimRequest]:
        edges = np.rint(np.append(0.0, np.cumsum(self._shares)) * draw.number).astype(int)
        phase = np.repeat(np.arange(len(_PHASES)), np.diff(edges))
        gaps = np.diff(draw.arrivals_s, prepend=draw.arrivals_s[:1])
        if draw.purpose != Purpose.CAPACITY:
            gaps = gaps * self._gaps[phase]
        times = draw.arrivals_s[:1].sum() + np.cumsum(gaps)
        made: list[SimRequest] = []
        for number, (name, kind) in enumerate(_PHASES.items()):
            self._classes = (kind,)
            here = times[phase == number]
            drawn = super().requests(draw._replace(arrivals_s=here, seed=draw.seed + number))
            made += [replace(request, class_name=name) for request in drawn]
        if draw.purpose == Purpose.CAPACITY:  # all kinds at once, as capacity has no phases
            order = np.random.default_rng(draw.seed).permutation(len(made))
            return [
                replace(made[i], arrival_s=float(at)) for i, at in zip(order, times, strict=True)
            ]
        return made
