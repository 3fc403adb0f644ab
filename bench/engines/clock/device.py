"""Describes servers that run a preset's engine on a device clock: their flags, environment,
settings and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

from bench.engines.clock.device_clock import STATE, DeviceModel, install
from bench.simulator.presets import PRESETS, Engine
from sage_sched.app.config import SageConfig
from sage_sched.app.registry import policy_names, policy_type, section_of

# A run that the host delayed for more than this share of the device's time says nothing about the
# device.
MAX_LATE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Device:
    """The engine of a preset, on servers that run `speed` times faster than reality.

    All times within a server are shorter by that factor, including its deadlines. The client
    converts arrivals and results to real time.
    """

    preset: str
    speed: float
    engine: Engine

    @classmethod
    def named(cls, preset: str, speed: float) -> Self:
        return cls(preset, speed, PRESETS[preset])

    def flags(self) -> tuple[str, ...]:
        """Return the server flags of the engine."""
        engine = self.engine
        return (
            # These two flags save the host work: the server does not poll while idle, and sends
            # tokens in groups, because the clock times them. From the 64th token on, the history
            # knows that an answer goes on.
            "--sleep-on-idle", "--stream-interval", "64",
            "--max-total-tokens", str(engine.kv_pool_tokens),
            "--max-running-requests", str(engine.max_running_requests),
            "--page-size", str(engine.page_size),
            "--chunked-prefill-size", str(engine.chunked_prefill_size),
            "--max-prefill-tokens", str(engine.max_prefill_tokens),
            *(("--enable-mixed-chunk",) if engine.mixed_chunk else ()),
            *_limit("--max-queued-requests", engine.max_queued_requests),
        )  # fmt: skip

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment, with the clock installed in folder."""
        facts = self.engine.server_facts()
        model = DeviceModel(facts.step_time, facts.swap_token_s, self.engine.host)
        return install(folder, model.times(1 / self.speed))

    def sped_up(self, sage: SageConfig) -> SageConfig:
        """Return the settings with every time divided by the speed."""
        faster: SageConfig = _faster(replace(sage, policy=_all_parameters(sage)), self.speed)
        return faster


def _all_parameters(sage: SageConfig) -> dict[str, Any]:
    """Return the parameters of every policy, as given or by default."""
    names = [name for name in policy_names() if section_of(name) == name]
    return {name: sage.policy.get(name, policy_type(name).Parameters()) for name in names}


def _faster(settings: Any, speed: float) -> Any:
    """Return settings with every time in them divided by the speed. The name of a time ends in
    _ms."""
    if isinstance(settings, Mapping):
        return {name: _faster(value, speed) for name, value in settings.items()}
    if not is_dataclass(settings):
        return settings
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    changed = {
        name: value / speed if name.endswith("_ms") else _faster(value, speed)
        for name, value in given.items()
    }
    return replace(settings, **changed)  # type: ignore[type-var]


def _limit(flag: str, number: int | None) -> tuple[str, ...]:
    return () if number is None else (flag, str(number))


def device_note(settings: Mapping[str, Any]) -> str:
    """Return the note for every table and report of a run with these settings; "" without a device
    clock."""
    if "device clock" not in settings:
        return ""
    pace = "" if settings["speed"] == 1 else f", {settings['speed']:g} times as fast as reality"
    return (
        f"device clock: {settings['device clock']}{pace} (real servers with a small model, whose "
        "steps take as long as a model of that GPU says; no GPU was measured)"
    )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a device during a run, in real-time seconds of the modelled device.

    num_late, late_s: steps that the host delayed, and the total delay.
    moved_s: time that KV moves delayed the device.
    host_cpu_s: CPU time of the scheduler's process, in seconds of the host.
    """

    num_steps: int
    device_s: float
    num_late: int
    late_s: float
    num_moves: int
    moved_s: float
    host_cpu_s: float

    @classmethod
    def between(cls, before: dict[str, Any], after: dict[str, Any], speed: float) -> Self:
        """Compare two internal states of a server. Raises KeyError if it has no device clock."""
        spent = {name: after[STATE][name] - number for name, number in before[STATE].items()}
        host_cpu_s = spent.pop("cpu_s")
        real = {name: n * speed if name.endswith("_s") else n for name, n in spent.items()}
        return cls(**real, host_cpu_s=host_cpu_s)

    def problem(self) -> str:
        """Return why the run must not be counted, or ""."""
        late_share = self.late_s / self.device_s if self.device_s else 0.0
        if late_share <= MAX_LATE_SHARE:
            return ""
        return (
            f"the host held the device up for {self.late_s:.1f} s of {self.device_s:.1f} s "
            f"({late_share:.1%}, allowed: {MAX_LATE_SHARE:.0%}; {self.num_late} of "
            f"{self.num_steps} steps): the host is overloaded, or the clock is too fast"
        )
