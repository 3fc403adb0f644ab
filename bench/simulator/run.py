"""The simulator's entry: requests in, Result out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from bench.simulator.node import Node
from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result, result_of
from bench.simulator.state import Options
from bench.simulator.stock import STOCK
from sage_sched.config import SageConfig
from sage_sched.policy import Policy, policy_named


def simulate(
    engine: Engine,
    policy_name: str,
    config: SageConfig,
    requests: Sequence[SimRequest],
    options: Options | None = None,
) -> Result:
    """Serve the requests (at least one, in order of arrival) on one engine.

    policy_name: a registered policy or one of stock.STOCK. Of config only the policy section
    counts: the policy gets the engine's own step time. Raises ValueError for an unknown policy and
    for requests that the engine cannot serve.
    """
    began = time.perf_counter()
    check_requests(engine, requests)
    finished: list[Progress] = []
    policy = make_policy(policy_name, config, engine)
    node = Node(engine, policy, options or Options(), finished.append)
    for index, request in enumerate(requests):
        node.submit(request, index)
    node.advance(math.inf)
    return result_of(
        engine,
        requests,
        finished,
        prefill_tokens=node.prefill_tokens,
        moved_tokens=node.moved_tokens,
        wall_s=time.perf_counter() - began,
    )


def make_policy(name: str, config: SageConfig, engine: Engine) -> Policy:
    """A policy for one engine. Raises ValueError where the name is unknown."""
    policy = STOCK[name] if name in STOCK else policy_named(name)
    return policy(config.policy, engine.server_facts())


def check_requests(engine: Engine, requests: Sequence[SimRequest]) -> None:
    """Raises ValueError, naming the request, where one is not as SimRequest says, comes before its
    predecessor, or would not fit the engine even alone (SGLang cuts its cap at that)."""
    if not requests:
        raise ValueError("there are no requests to simulate")
    last_s = 0.0
    for i, request in enumerate(requests):
        if not last_s <= request.arrival_s < math.inf:
            raise ValueError(f"request {i} comes at {request.arrival_s} s, after one at {last_s} s")
        last_s = request.arrival_s
        if request.input_tokens < 1 or not 1 <= request.output_tokens <= request.max_new_tokens:
            raise ValueError(f"request {i} has no possible lengths: {request}")
        most = request.input_tokens + request.max_new_tokens + engine.page_size
        if most >= engine.kv_pool_tokens:
            raise ValueError(f"request {i} may need {most} tokens of {engine.kv_pool_tokens}")
