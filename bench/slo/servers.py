"""Requests that were promised something, on real servers on a device clock."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.comparison.session_bodies import as_seen, served, session_servers
from bench.engines.clock.device import Device
from bench.engines.server.kept_server import KeptServer
from bench.engines.simulator.request import SimRequest
from bench.engines.simulator.result import Served
from bench.slo.runs import Setting
from sage_sched.distribution import LengthDistribution
from sage_sched.slo import SloClass, SloConfig

PRIORITY_FLAG = "--enable-priority-scheduling"
# Seen more often, tokens take more of a small host than decoding does.
_STREAM_FLAGS = ("--stream-interval", "16")


class Servers:
    """Serves requests by a policy, on a server of its own that is kept until another is asked for.

    Classes are claimed by priorities in the bodies, the heavier the larger, on all servers; the
    policies `NAME+priority` are SGLang's own with PRIORITY_FLAG, which goes by them, and
    `NAME/unmixed` any without mixed chunks. A token counts when the client has it, 16 at a time,
    evenly between.
    """

    def __init__(self, setting: Setting, folder: Path, speed: float) -> None:
        self._setting = setting
        self._folder = folder
        self._speed = speed
        self._priorities = {
            f"w{weight:g}": priority for priority, weight in enumerate(sorted(setting.weights), 1)
        }
        self._kept: KeptServer | None = None
        self._as: tuple[tuple[str, ...], bool] = ((), False)
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """End the server."""
        self._stack.close()

    def __call__(self, policy: str, requests: Sequence[SimRequest]) -> Served:
        """Raises ServerError if a server fails, or the host is too slow for the clock."""
        named, _, unmixed = policy.partition("/")
        name, _, by_priority = named.partition("+")
        kept = self._kept_with((PRIORITY_FLAG,) if by_priority else (), bool(unmixed))
        times, _ = served(kept, name, requests, self._priority_of)
        return as_seen(self._setting.engine, requests, times)

    def _kept_with(self, flags: tuple[str, ...], unmixed: bool) -> KeptServer:
        if self._kept is None or (flags, unmixed) != self._as:
            self.close()
            engine = self._setting.engine
            engine = replace(engine, mixed_chunk=engine.mixed_chunk and not unmixed)
            lengths = LengthDistribution.from_samples(self._setting.lengths.history[1], "warm")
            servers = session_servers(
                self._folder,
                Device("h800-qwen3-32b", self._speed, engine),
                lengths.compressed(64),
                self._slo(),
                (*_STREAM_FLAGS, *flags),
            )
            self._kept = self._stack.enter_context(KeptServer(servers))
            self._as = flags, unmixed
        return self._kept

    def _slo(self) -> SloConfig:
        setting = self._setting
        return SloConfig(
            trust="body",
            first_token_weight=setting.lengths.first_token_weight,
            classes={
                f"w{weight:g}": SloClass(
                    priority=self._priorities[f"w{weight:g}"],
                    weight=weight,
                    ttft_slo_ms=setting.ttft_slo_ms,
                    tpot_slo_ms=setting.tpot_slo_ms,
                )
                for weight in setting.weights
            },
        )

    def _priority_of(self, request: SimRequest) -> int:
        return self._priorities[request.hints.slo_class]
