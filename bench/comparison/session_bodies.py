"""What serves requests that may wait for one another's answers: the simulator, or a real server on
a device clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.servers.device import Device, DeviceUse
from bench.servers.kept_server import KeptServer
from bench.servers.model import write_model
from bench.servers.policy_server import (
    CPU_ENGINE_FLAGS,
    CPU_ENV,
    CPU_MODEL,
    PolicyServers,
    internal_state,
)
from bench.servers.server import ServerError
from bench.servers.session_client import Times, serve_sessions
from bench.simulator.presets import Engine
from bench.simulator.request import SimRequest
from bench.simulator.run import simulate
from bench.simulator.state import Options
from predictor_store.warm import Observation
from sage_sched.config import HintsConfig, SageConfig
from sage_sched.distribution import LengthDistribution

# When each request came and was answered, and how many tokens of their prompts were cached.
Outcome = tuple[list[Times], int]
# Of a policy and its requests.
Serve = Callable[[str, Sequence[SimRequest]], Outcome]

_VOCABULARY = 16384


def simulated(engine: Engine, policy: str, requests: Sequence[SimRequest]) -> Outcome:
    """In the simulator."""
    result = simulate(engine, policy, SageConfig(), requests, Options(preempt=True))
    arrays = (result.arrival_s, result.ttft_s, result.ttlt_s)
    times = [Times(at, at + ttft, at + ttlt, 0) for at, ttft, ttlt in zip(*arrays, strict=True)]
    return times, sum(request.input_tokens for request in requests) - result.prefill_tokens


def served(kept: KeptServer, policy: str, requests: Sequence[SimRequest]) -> Outcome:
    """On a real server, on its device's clock. Raises ServerError if the host was too slow for
    the clock."""
    server, device = kept.get(policy, f"{policy} sessions"), kept.device
    before = internal_state(server)
    times = asyncio.run(
        serve_sessions(
            server.url,
            requests,
            vocabulary=_VOCABULARY,
            speed=device.speed,
            label=policy,
        )
    )
    use = DeviceUse.between(before, internal_state(server), device.speed)
    if problem := use.problem():
        raise ServerError(problem)
    return times, sum(each.cached_tokens for each in times)


def session_servers(folder: Path, device: Device, foreseen: LengthDistribution) -> PolicyServers:
    """Servers of the device's engine, to which all answers are foreseen alike."""
    servers = PolicyServers(
        model=write_model(
            folder / "model",
            **CPU_MODEL,
            vocab_size=_VOCABULARY,
            context_length=device.engine.kv_pool_tokens,
        ),
        folder=folder,
        flags=CPU_ENGINE_FLAGS,
        env=CPU_ENV,
        sage=SageConfig(hints=HintsConfig(trust="body")),
        device=device,
    )
    servers.warm([Observation(f"step {i}", n) for i, n in enumerate(foreseen.lengths.tolist())])
    return servers
