"""Runs requests through the simulator, and returns a Result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bench.policies.rival import Rival
from bench.policies.srpt_oracle import ORACLE, SrptOracle, SrptOracleParameters
from bench.simulator.node import Node
from bench.simulator.pool import OutOfMemoryError
from bench.simulator.presets import Engine
from bench.simulator.request import Progress, SimRequest
from bench.simulator.result import Result, alone_s
from bench.simulator.state import Options
from bench.simulator.stock import STOCK, StockPolicy
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_named
from sage_sched.policy import Policy


def simulate(
    engine: Engine,
    policy: str | Policy,
    config: SageConfig,
    requests: Sequence[SimRequest],
    options: Options | None = None,
    on_served: Callable[[], object] | None = None,
) -> Result:
    """Serve the requests (at least one, in order of arrival) on one engine.

    Raises ValueError for an unknown policy and for requests that the engine cannot serve, and
    OutOfMemoryError if SGLang's scheduler would run out of memory and end.

    policy: a policy, or a name: of a registered policy, of one in stock.STOCK, or ORACLE. A name
        may have settings, as bench.policies.rival.Rival reads them.
    config: only its section `policy` is used. The policy gets the engine's own step time.
    on_served: called whenever a request gets its last token.
    """
    check_requests(engine, requests)
    finished: list[Progress] = []
    followers = defaultdict[int | None, list[int]](list)
    for index, request in enumerate(requests):
        followers[request.follows].append(index)

    def on_finish(progress: Progress) -> None:
        finished.append(progress)
        if on_served is not None:
            on_served()
        for index in followers[progress.index]:
            comes_s = progress.last_token_s + requests[index].pause_s
            node.submit(replace(requests[index], arrival_s=comes_s), index)

    node = make_node(engine, policy, config, options or Options(), on_finish)
    for index in followers[None]:
        node.submit(requests[index], index)
    try:
        node.advance(math.inf)
    except OutOfMemoryError as error:
        error.at_s = node.now_s
        raise
    return result_of(engine, requests, finished, [node])


def make_node(
    engine: Engine,
    policy: str | Policy,
    config: SageConfig,
    options: Options,
    on_finish: Callable[[Progress], None],
) -> Node:
    """Return one engine under a policy. Raises ValueError if the policy is unknown."""
    return Node(*engine_and_policy(engine, policy, config), config, options, on_finish)


def engine_and_policy(
    engine: Engine, policy: str | Policy, config: SageConfig
) -> tuple[Engine, Policy | StockPolicy]:
    """Return an engine tuned for the policy, which may be a name, and the policy. Raises ValueError
    if it is unknown."""
    if isinstance(policy, Policy):
        return engine, policy
    rival = Rival.parse(policy)
    tuned = replace(engine, **rival.engine_fields)  # type: ignore[arg-type]
    stock = STOCK.get(rival.policy)
    if stock is not None:
        return tuned, stock()
    facts = tuned.server_facts()
    if rival.policy == ORACLE:
        parameters = config.policy.get(ORACLE, SrptOracleParameters())
        return tuned, SrptOracle(parameters, facts)
    return tuned, policy_named(rival.policy, config.policy, facts)


def check_requests(engine: Engine, requests: Sequence[SimRequest]) -> None:
    """Raise ValueError, naming the request, for requests that cannot be served.

    Such a request violates SimRequest, arrives before its predecessor in the list without following
    another, or would not fit the engine even alone (SGLang cuts its cap to fit).
    """
    if not requests:
        raise ValueError("there are no requests to simulate")
    last_s = 0.0
    for i, request in enumerate(requests):
        if request.follows is not None:
            if not 0 <= request.follows < i or not 0 <= request.pause_s < math.inf:
                raise ValueError(f"request {i} follows none that comes before it: {request}")
        elif not last_s <= request.arrival_s < math.inf:
            raise ValueError(
                f"request {i} arrives at {request.arrival_s} s, but one before it at {last_s} s"
            )
        else:
            last_s = request.arrival_s
        shared_tokens = sum(end - first for _, first, end in request.spans)
        if request.spans and shared_tokens != request.input_tokens:
            raise ValueError(f"request {i} has spans of {shared_tokens} tokens: {request}")
        if request.input_tokens < 1 or not 1 <= request.output_tokens <= request.max_new_tokens:
            raise ValueError(f"request {i} has impossible lengths: {request}")
        most = request.input_tokens + request.max_new_tokens + engine.page_size
        if most >= engine.kv_pool_tokens:
            raise ValueError(f"request {i} may need {most} tokens of {engine.kv_pool_tokens}")


def result_of(
    engine: Engine,
    requests: Sequence[SimRequest],
    finished: Sequence[Progress],
    nodes: Sequence[Node],
) -> Result:
    """Return the result of the requests as they finished, in any order, on these nodes. Refused
    requests are left out. Raises RuntimeError if one is missing, came twice, or has a wrong
    length."""
    ordered = sorted(finished, key=lambda p: p.index)
    prefill_tokens = sum(node.prefill_tokens for node in nodes)
    refused = {index for node in nodes for index in node.refused}
    if [p.index for p in ordered] != [i for i in range(len(requests)) if i not in refused]:
        raise RuntimeError("a request was lost or finished twice")
    requests = [p.request for p in ordered]
    if any(p.generated_tokens != p.request.output_tokens for p in ordered):
        raise RuntimeError("a request does not have its true length")
    arrival_s = np.array([p.request.arrival_s for p in ordered])
    first_s = np.array([p.first_token_s for p in ordered])
    last_s = np.array([p.last_token_s for p in ordered])
    if not ((arrival_s <= first_s) & (first_s <= last_s)).all():
        raise RuntimeError("a request was served before it came")
    return Result.of(
        partial(alone_s, engine),
        requests,
        arrival_s,
        first_s,
        last_s,
        num_next_on_time=np.array([p.num_next_on_time for p in ordered]),
        num_refused=len(refused),
        cached_tokens=sum(request.input_tokens for request in requests) - prefill_tokens,
        num_retractions=np.array([p.num_retractions for p in ordered]),
        pauses_s=tuple(tuple(p.pauses_s) for p in ordered),
        longest_gap_s=np.array([p.longest_gap_s for p in ordered]),
        num_preemptions=np.array([p.job.num_preemptions for p in ordered]),
        preemptions=sum((node.state.num_preemptions for node in nodes), Counter()),
        gaps=sum((node.gaps for node in nodes), Counter()),
        prefill_tokens=prefill_tokens,
        moved_tokens=sum(node.moved_tokens for node in nodes),
        peak_host_tokens=sum(node.state.peak_host_tokens for node in nodes),
    )
