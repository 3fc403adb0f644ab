"""Makes the traffic of one heavy tenant among many light ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.simulator.request import SimRequest
from bench.workloads.prompt_source import Prompts
from bench.workloads.source import Draw
from sage_sched.job import Hints
from sage_sched.slo import SloClaims

_HEAVY = "heavy"


class Tenants(Prompts):
    """Requests of one heavy tenant and light ones, classes "heavy" and "light", all with the same
    prompts. Each belongs to the default class of the arm's settings, as in an HTTP process.

    heavy_share: the heavy tenant's share of the requests. num_light: the others, all alike.
    """

    def __init__(self, data: Path | None, *, heavy_share: float = 0.7, num_light: int = 20) -> None:
        super().__init__(data, "tenants")
        self._shares = [heavy_share, *[(1 - heavy_share) / num_light] * num_light]
        self._names = [_HEAVY, *(f"light {number}" for number in range(num_light))]

    def requests(self, draw: Draw) -> list[SimRequest]:
        rng = np.random.default_rng([draw.seed, 29])
        tenants = rng.choice(self._names, draw.number, p=self._shares).tolist()
        claims = SloClaims(draw.arm.config.slo)
        return [
            replace(
                request,
                class_name=_HEAVY if tenant == _HEAVY else "light",
                hints=claims.hints(claims.class_of(None, None), Hints(tenant=tenant)),
            )
            for request, tenant in zip(super().requests(draw), tenants, strict=True)
        ]
