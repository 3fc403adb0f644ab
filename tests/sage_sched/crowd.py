"""Random traffic on a small simulated server, and the requests that overtake others there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import EngineState, Options
from sage_sched.app.config import SageConfig
from sage_sched.job import Hints, Job
from sage_sched.policy import Policy
from tests.bench.simulator.invariants import watch as check
from tests.bench.simulator.traffic import STEP_TIME, known, request

ROOMY = Engine(STEP_TIME, kv_pool_tokens=3000, max_running_requests=4, max_prefill_tokens=320)
# Prompts are chunked, and memory runs out: moves take no time, so little is kept free.
STARVED = replace(ROOMY, kv_pool_tokens=750, chunked_prefill_size=128, swap_token_s=0.0)


def crowd(
    seed: int, longest: Sequence[int] = (5, 40, 150), urgencies: Sequence[int] = (3,)
) -> list[SimRequest]:
    """Eighty requests, one in ten without a prediction, at more than the server can do. longest:
    the most tokens of an answer; each request draws one of these, and one of the urgencies."""
    rng, requests, now_s = random.Random(seed), list[SimRequest](), 0.0
    for _ in range(80):
        now_s += rng.choice([0.0, 0.1, 1.0]) * rng.expovariate(1)
        most = rng.choice(longest)
        forecast = known(*(rng.randint(1, most) for _ in range(8)))
        length = min(400, rng.randint(1, most) * rng.choice((1, 1, 1, 5)))
        hints = Hints(urgency=rng.choice(urgencies))
        distribution = forecast if rng.random() < 0.9 else None
        tokens = rng.choice((5, 50, 300)), length, 400
        requests.append(request(now_s, *tokens, distribution=distribution, hints=hints))
    return requests


def overtakings(
    policy: Policy, requests: Sequence[SimRequest], engine: Engine = ROOMY
) -> list[tuple[Job, Job]]:
    """Pairs of an admitted and a waiting job, of all passes and all ranked jobs."""
    found: list[tuple[Job, Job]] = []

    def watch(
        state: EngineState, before: list[Progress], after: list[Progress], num_outstanding: int
    ) -> None:
        check(state, before, after, num_outstanding)
        left = {*after}
        found.extend(
            (admitted.job, waits.job)
            for admitted in before
            if admitted not in left and admitted.job.is_ranked
            for waits in before
            if waits in left and waits.job.is_ranked
        )

    simulate(engine, policy, SageConfig(), requests, Options(watch=watch))
    return found
