"""What serves requests that may wait for one another's answers: the simulator, or a real server on
a device clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.engines.clock.device import Device, DeviceUse
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.model import write_model
from bench.engines.server.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_MODEL,
    PolicyServers,
    internal_state,
)
from bench.engines.server.server import ServerError
from bench.engines.server.session_client import Times, serve_sessions
from bench.engines.simulator.presets import Engine
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Served
from bench.engines.simulator.run import simulate
from bench.engines.simulator.state import Options
from predictor_store.data.warm import Observation
from sage_sched.config import HintsConfig, SageConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.slo import Promise, SloConfig

# When each request came and was answered, and how many tokens of their prompts were cached.
Outcome = tuple[list[Times], int]
# Of a policy and its requests.
Serve = Callable[[str, Sequence[SimRequest]], Outcome]

_VOCABULARY = 16384
# How often requests are served, at most, that the host held up: it may have been busy for a while.
_TRIES = 3


def simulated(engine: Engine, policy: str, requests: Sequence[SimRequest]) -> Outcome:
    """In the simulator."""
    result = simulate(engine, policy, SageConfig(), requests, Options(preempt=True))
    arrays = (result.arrival_s, result.ttft_s, result.ttlt_s)
    times = [Times(at, at + ttft, at + ttlt, 0) for at, ttft, ttlt in zip(*arrays, strict=True)]
    return times, sum(request.input_tokens for request in requests) - result.prefill_tokens


def served(
    kept: KeptServer,
    policy: str,
    requests: Sequence[SimRequest],
    priority_of: Callable[[SimRequest], int] | None = None,
) -> Outcome:
    """On a real server, on its device's clock. Raises ServerError if the host was too slow for
    the clock, each time that it was tried."""
    problem = ""
    for _ in range(_TRIES):
        server, device = kept.get(policy, f"{policy} sessions"), kept.device
        before = internal_state(server)
        times = asyncio.run(
            serve_sessions(
                server.url,
                requests,
                vocabulary=_VOCABULARY,
                speed=device.speed,
                label=policy,
                priority_of=priority_of,
            )
        )
        use = DeviceUse.between(before, internal_state(server), device.speed)
        problem = use.problem()
        if not problem:
            return times, sum(each.cached_tokens for each in times)
        tqdm.write(problem)
    raise ServerError(problem)


def as_seen(engine: Engine, requests: Sequence[SimRequest], times: Sequence[Times]) -> Served:
    """What clients of a server saw of these requests."""
    arrival_s, first_s, last_s = (
        np.array([getattr(each, name) for each in times])
        for name in ("arrival_s", "first_token_s", "last_token_s")
    )
    num_on_time = [_num_on_time(*pair) for pair in zip(requests, times, strict=True)]
    return Served.of(engine, requests, arrival_s, first_s, last_s, np.array(num_on_time))


def _num_on_time(request: SimRequest, times: Times) -> int:
    """Of the tokens but the first."""
    promise = Promise.of(request.hints)
    token_s = times.token_s(request.output_tokens) - times.arrival_s
    due_s = [promise.due_s(token, token_s[0]) for token in range(2, len(token_s) + 1)]
    return int((token_s[1:] <= due_s).sum())


def session_servers(
    folder: Path,
    device: Device,
    foreseen: LengthDistribution,
    slo: SloConfig | None = None,
    flags: Sequence[str] = (),
) -> PolicyServers:
    """Servers of the device's engine, to which all answers are foreseen alike. flags: beside the
    engine's."""
    servers = PolicyServers(
        model=write_model(
            folder / "model",
            **CPU_MODEL,
            vocab_size=_VOCABULARY,
            context_length=device.engine.kv_pool_tokens,
        ),
        folder=folder,
        flags=(*CPU_ENGINE_FLAGS, *flags),
        env=CPU_ENV,
        sage=SageConfig(hints=HintsConfig(trust="body"), slo=slo or SloConfig()),
        device=device,
    )
    servers.warm([Observation(f"step {i}", n) for i, n in enumerate(foreseen.lengths.tolist())])
    return servers
