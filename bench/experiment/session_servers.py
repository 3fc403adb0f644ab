"""Real servers on a device clock, for requests of lengths alone, which may wait for one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.clock.device import Device
from bench.engines.server.client import Answer, as_seen, body_of, drive, problem_of
from bench.engines.server.kept_server import KeptServer
from bench.engines.server.model import write_model
from bench.engines.server.options import servers_in
from bench.engines.server.policy_server import CPU_MODEL, PolicyServers
from bench.engines.server.server import ServerError
from bench.experiment.spec import Load
from bench.policies.arm import Arm
from bench.simulator.request import SimRequest
from bench.simulator.result import Served, alone_s
from bench.workloads.source import Source
from predictor_store.data.warm import Observation
from sage_sched.config import SageConfig
from sage_sched.job import CLIENTS_HINTS, NO_HINTS

_VOCABULARY = 16384
# Token ids below are kept for special tokens.
_FIRST_TOKEN_ID = 1000
# Seen more often than every 16th of them, tokens take more of a small host than decoding does; at
# life's speed or slower it sees each.
_STREAM_INTERVAL = 16


class SessionServers:
    """Serves an arm's requests on a server of its own, which is kept until another is asked for.

    To our policies all answers are foreseen alike. A token counts when the client has it; faster
    than life they come 16 at a time, and count as even between.
    """

    def __init__(self, load: Load, source: Source, folder: Path, speed: float) -> None:
        self._load, self._source, self._folder, self._speed = load, source, folder, speed
        self._kept: KeptServer | None = None
        self._arm: Arm | None = None

    def close(self) -> None:
        """End the server."""
        if self._kept is not None:
            self._kept.close()

    def __call__(self, arm: Arm, requests: Sequence[SimRequest], seed: int = 0) -> Served:
        """Raises ServerError if a server fails, or the host is too slow for the clock each time."""
        if self._kept is None or arm != self._arm:
            self.close()
            self._kept, self._arm = KeptServer(self._servers(arm)), arm
        bodies = [self._body(number, request) for number, request in enumerate(requests)]

        def send(url: str) -> list[Answer]:
            return drive(
                url,
                bodies,
                [request.arrival_s for request in requests],
                label=arm.name,
                speed=self._speed,
                follows=[request.follows for request in requests],
                pauses_s=[request.pause_s for request in requests],
            )

        run = self._kept.run(arm.policy, f"{arm.policy} sessions", send)
        if problem := problem_of(run.answers) or run.late:
            raise ServerError(problem)
        return as_seen(partial(alone_s, self._load.engine_of(arm)), requests, run.answers)

    def _body(self, number: int, request: SimRequest) -> dict[str, Any]:
        spans = request.spans or ((-1 - number, 0, request.input_tokens),)
        tokens = np.concatenate([_tokens(stream, end)[first:] for stream, first, end in spans])
        hints, cap = request.hints, request.max_new_tokens
        given = {name: getattr(hints, name) for name in CLIENTS_HINTS}
        said = {name: value for name, value in given.items() if value != getattr(NO_HINTS, name)}
        body = body_of(tokens.tolist(), request.output_tokens, cap, **said)
        return body | {"priority": self._source.priority_of(request)}

    def _servers(self, arm: Arm) -> PolicyServers:
        engine = self._load.engine_of(arm)
        slo = asdict(self._source.slo())
        sage = SageConfig.parse({**arm.settings, "slo": slo, "hints": {"trust": "body"}})
        shape = {**CPU_MODEL, "vocab_size": _VOCABULARY, "context_length": engine.kv_pool_tokens}
        servers = servers_in(
            self._folder,
            sage,
            Device(self._load.preset, self._speed, engine),
            model=write_model(self._folder / "model", **shape),
            flags=("--stream-interval", str(_STREAM_INTERVAL if self._speed > 1 else 1)),
            env={},
        )
        lengths = self._source.all_answers().lengths.tolist()
        servers.warm([Observation(f"step {i}", n) for i, n in enumerate(lengths)])
        return servers


def _tokens(stream: int, num_tokens: int) -> np.ndarray:
    """The first tokens of a stream; the more one asks for, the more follow."""
    generator = np.random.default_rng(abs(stream) * 2 + (stream < 0))
    return generator.integers(_FIRST_TOKEN_ID, _VOCABULARY, num_tokens)
