"""An operator's log under other policies, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from bench.engines.rival import Rival
from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Result
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from bench.whatif.log import Logged
from bench.whatif.shared_prompts import spans_of
from bench.whatif.told import Forecasts, Told
from sage_sched.config import SageConfig
from sage_sched.registry import policy_names


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's results, one for each of the variants of what is told; one alone if it goes by no
    prediction. usual: as in Told."""

    policy: str
    results: tuple[Result, ...]
    usual: int


def most_tokens(engine: Engine, request: Logged) -> int:
    """The longest answer that it may have there, alone."""
    return engine.kv_pool_tokens - engine.page_size - request.input_tokens - 1


def requests_of(
    engine: Engine, requests: Sequence[Logged], cap_tokens: int | None
) -> list[SimRequest]:
    """For the simulator, without predictions; each fits the engine. cap_tokens: of those of whose
    cap the log says nothing; None: the rest of the context."""
    found = []
    for request, prompt in zip(requests, spans_of(requests), strict=True):
        most = most_tokens(engine, request)
        cap = (cap_tokens if request.cap_tokens is None else request.cap_tokens) or most
        found.append(
            SimRequest(
                arrival_s=request.arrival_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                max_new_tokens=min(max(cap, request.output_tokens), most),
                distribution=None,
                class_name="log",
                spans=prompt,
            )
        )
    return found


def outcomes(
    engine: Engine,
    policies: Sequence[str],
    requests: Sequence[SimRequest],
    told: Told,
    config: SageConfig,
) -> list[Outcome]:
    """Each policy's, with a bar that counts requests served. Raises ValueError for a policy that is
    unknown."""
    num_runs = sum(len(told.variants) if predicts(policy) else 1 for policy in policies)
    found = []
    options = Options(preempt=config.preemption.enabled)
    with tqdm(
        total=num_runs * len(requests), desc="simulating", unit="request", mininterval=1
    ) as bar:
        for policy in policies:
            bar.set_postfix_str(policy)
            variants = told.variants if predicts(policy) else told.variants[:1]
            results = tuple(
                simulate(engine, policy, config, _with(requests, said), options, bar.update)
                for said in variants
            )
            found.append(Outcome(policy, results, min(told.usual, len(results))))
    return found


def predicts(policy: str) -> bool:
    """Whether it is told of answers beforehand."""
    return Rival.parse(policy).policy in policy_names()


def _with(requests: Sequence[SimRequest], said: Forecasts) -> list[SimRequest]:
    """As a server tells its schedulers: no length beyond the cap."""
    return [
        replace(each, distribution=None if found is None else found.capped(each.max_new_tokens))
        for each, found in zip(requests, said, strict=True)
    ]
