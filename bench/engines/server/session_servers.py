"""Real servers on a device clock, for requests of lengths alone, which may wait for one another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
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
from bench.experiment.spec import Arm, Load
from bench.workloads.source import Source
from predictor_store.data.warm import Observation
from sage_sched.config import SageConfig
from sage_sched.slo import Promise

_VOCABULARY = 16384
# How often requests are served, at most, that the host held up: it may have been busy for a while.
_TRIES = 3
# Seen more often, tokens take more of a small host than decoding does.
_STREAM_FLAGS = ("--stream-interval", "16")


class SessionServers:
    """Serves an arm's requests on a server of its own, which is kept until another is asked for.

    To our policies all answers are foreseen alike. A token counts when the client has it, 16 at a
    time, evenly between.
    """

    def __init__(self, load: Load, source: Source, folder: Path, speed: float) -> None:
        self._load, self._source, self._folder, self._speed = load, source, folder, speed
        self._kept: KeptServer | None = None
        self._arm: Arm | None = None
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """End the server."""
        self._stack.close()
        self._kept = None

    def __call__(self, arm: Arm, requests: Sequence[SimRequest]) -> Served:
        """Raises ServerError if a server fails, or the host is too slow for the clock each time."""
        if self._kept is None or arm != self._arm:
            self.close()
            self._kept = self._stack.enter_context(KeptServer(self._servers(arm)))
            self._arm = arm
        problem = ""
        for _ in range(_TRIES):
            server, device = self._kept.get(arm.policy, f"{arm.policy} sessions"), self._kept.device
            before = internal_state(server)
            times = asyncio.run(
                serve_sessions(
                    server.url,
                    requests,
                    vocabulary=_VOCABULARY,
                    speed=device.speed,
                    label=arm.name,
                    priority_of=self._source.priority_of,
                )
            )
            problem = DeviceUse.between(before, internal_state(server), device.speed).problem()
            if not problem:
                return as_seen(device.engine, requests, times)
            tqdm.write(problem)
        raise ServerError(problem)

    def _servers(self, arm: Arm) -> PolicyServers:
        engine = self._load.engine_of(arm)
        sage = SageConfig.parse(
            {
                **arm.settings,
                "slo": asdict(self._source.slo()),
                "hints": {"trust": "body"},
            }
        )
        servers = PolicyServers(
            model=write_model(
                self._folder / "model",
                **CPU_MODEL,
                vocab_size=_VOCABULARY,
                context_length=engine.kv_pool_tokens,
            ),
            folder=self._folder,
            flags=(*CPU_ENGINE_FLAGS, *_STREAM_FLAGS, *arm.flags),
            env=CPU_ENV,
            sage=sage,
            device=Device(self._load.preset, self._speed, engine),
        )
        lengths = self._source.all_answers().lengths.tolist()
        servers.warm([Observation(f"step {i}", n) for i, n in enumerate(lengths)])
        return servers


def as_seen(engine: Engine, requests: Sequence[SimRequest], times: Sequence[Times]) -> Served:
    """What clients of a server saw of these requests."""
    arrival_s, first_s, last_s = (
        np.array([getattr(each, name) for each in times])
        for name in ("arrival_s", "first_token_s", "last_token_s")
    )
    num_on_time = [_num_on_time(*pair) for pair in zip(requests, times, strict=True)]
    cached_tokens = sum(each.cached_tokens for each in times)
    on_time = np.array(num_on_time)
    return Served.of(engine, requests, arrival_s, first_s, last_s, on_time, cached_tokens)


def _num_on_time(request: SimRequest, times: Times) -> int:
    """Of the tokens but the first."""
    promise = Promise.of(request.hints)
    token_s = times.token_s(request.output_tokens) - times.arrival_s
    due_s = [promise.due_s(token, token_s[0]) for token in range(2, len(token_s) + 1)]
    return int((token_s[1:] <= due_s).sum())
