"""What an experiment is, as a TOML file says it: arms under loads, with seeds (docs/bench.md)."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeVar

from bench.engines.rival import Rival
from bench.engines.simulator.presets import PRESETS, Engine
from bench.workloads.arrivals import LOADS, RECORDED
from sage_sched.config import SageConfig
from sage_sched.fields import ConfigError, UserError

T = TypeVar("T")
FOLDER = Path(__file__).parents[1] / "experiments"
# Of a load's capacity_by: the best setting of SGLang's policies.
TUNED = "tuned"
PREDICTORS = ("semantic", "threshold alone", "input length", "none", "truth")


class SpecError(UserError, ValueError):
    """An experiment that cannot be; the message says where, and what is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One row of a table.

    policy: as bench.engines.rival.Rival writes it, tuned where it is SGLang's. label: of the row;
        by default the policy.
    settings: sections of our policies' configuration that differ from the defaults.
    engine: fields of the engine that differ from the load's.
    preempt: whether requests may leave the engine. predictor: one of PREDICTORS. wrong_by: a factor
        on all lengths foreseen. noise: whether a uniform distribution is mixed in.
    said_by: who says how urgent requests are, where a workload has several. Of agents' steps a
        "client" says about when the next one comes, and which is the last; nobody else does.
    dispatch: the router before the engines, where a load has several.
    """

    policy: str
    label: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    preempt: bool = True
    predictor: str = "semantic"
    wrong_by: float = 1.0
    noise: bool = False
    said_by: str = "expert"
    dispatch: str = "total_requests"

    @property
    def name(self) -> str:
        """Of its row."""
        return self.label or self.policy

    @property
    def config(self) -> SageConfig:
        """Our policies' settings. Raises ConfigError."""
        return SageConfig.parse(self.settings)

    @classmethod
    def parse(cls, found: Any, where: str) -> Self:
        """From a policy's name, or a table. Raises SpecError."""
        arm = _parsed(cls, {"policy": found} if isinstance(found, str) else found, where)
        try:
            Rival.parse(arm.policy)
            _ = arm.config
        except (ValueError, ConfigError) as error:
            raise SpecError(f"{where}: {error}") from error
        _require(arm.predictor in PREDICTORS, where, "predictor", arm.predictor, PREDICTORS)
        return arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One column of an experiment.

    workload: a name of bench.workloads.sources, or a table of it and its options.
    rate: requests per second, or "2x" for twice what capacity_by sustains.
    mix: the loads of one mix differ in rate alone.
    arrivals: one of bench.workloads.arrivals.LOADS, or RECORDED.
    num_requests: a run; None for what the arrivals have.
    preset, engine: the engine, and fields of it that differ. nodes: how many of them. apart:
        whether so many prefill and as many others decode.
    capacity_by: a policy; TUNED for the one that the experiment's tuning finds best.
    measured: results are of the requests from one share of the arrivals to another, so that they
        leave out how a queue begins and how it drains.
    ttft_slo_ms, tpot_slo_ms: what a good request keeps.
    """

    name: str
    mix: str = ""
    workload: Mapping[str, Any] = field(default_factory=lambda: {"name": "generated"})
    rate: str = "2x"
    arrivals: str = "sustained"
    num_requests: int | None = None
    max_new_tokens: int = 4096
    preset: str = "h800-qwen3-32b"
    engine: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    apart: bool = False
    capacity_by: str = "fcfs"
    measured: Sequence[float] = (0.0, 1.0)
    ttft_slo_ms: float = 2000.0
    tpot_slo_ms: float = 100.0

    def engine_of(self, arm: Arm) -> Engine:
        """What an arm runs on."""
        engine = PRESETS[self.preset]
        return dataclasses.replace(engine, **{**self.engine, **arm.engine})

    @classmethod
    def parse(cls, name: str, found: Mapping[str, Any], where: str) -> Self:
        """Raises SpecError."""
        given = dict(found)
        if isinstance(given.get("workload"), str):
            given["workload"] = {"name": given["workload"]}
        if "rate" in given:
            given["rate"] = f"{given['rate']}"
        load = _parsed(cls, {"name": name, **given}, where)
        _require(load.preset in PRESETS, where, "preset", load.preset, PRESETS)
        allowed = (*LOADS, RECORDED)
        _require(load.arrivals in allowed, where, "arrivals", load.arrivals, allowed)
        fields = {f.name for f in dataclasses.fields(Engine)}
        for name in load.engine:
            _require(name in fields, where, "engine", name, fields)
        requests_per_s(load.rate, 1.0)
        return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """SGLang's policies by each clip. The best of them is the experiment's first arm.

    by: the metric that is smallest for the best; `good_share` is largest.
    seeds: those on which nothing is reported.
    rates: one setting for all of a mix: the best at these, where "1x" is what a filled server
        (fcfs-fill) sustains; none: the best setting for each load.
    """

    policies: Sequence[str]
    clips: Sequence[int]
    by: str = "mean_e2e_latency_ms"
    seeds: Sequence[int] = (11, 12)
    rates: Sequence[str] = ()

    def arms(self) -> list[Arm]:
        """All that are tried."""
        tried = product(self.policies, self.clips)
        return [Arm(policy=f"{policy}@clip={clip}") for policy, clip in tried]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """name: of the file. arms: ratios are to the first, or to `reference`. columns: of the table,
    beside the ratios, see bench.experiment.run.measured. seeds: how many, from first_seed on."""

    name: str
    title: str
    arms: Sequence[Arm]
    loads: Sequence[Load]
    columns: Sequence[str] = (
        "mean_e2e_latency_ms", "p99_e2e_latency_ms", "mean_waited_s", "mean_ttft_ms", "p99_itl_ms",
        "max_itl_ms", "arriving_throughput",
    )  # fmt: skip
    ratios: Sequence[str] = ("mean_e2e_latency_ms", "p99_e2e_latency_ms")
    reference: str = ""
    seeds: int = 3
    first_seed: int = 0
    engine: str = "sim"
    speed: float = 4.0
    tuned: Tuning | None = None

    @property
    def sweeps(self) -> bool:
        """Whether its mixes have several rates."""
        return any(load.mix != load.name for load in self.loads)

    @classmethod
    def read(cls, name_or_file: str) -> Self:
        """One of FOLDER, or a file of your own. Raises SpecError."""
        file = FOLDER / f"{name_or_file}.toml"
        if name_or_file.endswith(".toml"):
            file = Path(name_or_file)
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                f"there is no experiment {name_or_file!r}, known: {', '.join(names())}"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{file}: {error}") from error
        return cls.parse(file.stem, found)

    @classmethod
    def parse(cls, name: str, found: Mapping[str, Any]) -> Self:
        """Raises SpecError, which says where, and what is allowed."""
        given = dict(found)
        defaults = given.pop("defaults", {})
        loads = given.pop("loads", {}) or {f"{defaults.get('rate', '2x')}": {}}
        arms = [Arm.parse(arm, f"{name}: arms") for arm in given.pop("arms", ())]
        tuned = given.pop("tuned", None)
        experiment = _parsed(
            cls,
            {
                **given,
                "name": name,
                "arms": arms,
                "tuned": None if tuned is None else _parsed(Tuning, tuned, f"{name}: tuned"),
                "loads": [
                    load
                    for mix, differs in loads.items()
                    for load in _loads_of(mix, {**defaults, **differs}, f"{name}: loads.{mix}")
                ],
            },
            name,
        )
        labels = [arm.name for arm in arms]
        _require(len(labels) == len(set(labels)), name, "arms", "of the same label", labels)
        _require(bool(arms), name, "arms", "nothing", ["at least one policy"])
        return experiment


def names() -> list[str]:
    """Of all experiments that come with this package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def requests_per_s(rate: str, capacity: float) -> float:
    """What a rate means. Raises ValueError, which says what is allowed."""
    number = rate.removesuffix("x")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise SpecError(f"rate is {rate!r}, allowed: requests/s above 0 (3.5) or a multiple (2x)")
    return value * capacity if rate.endswith("x") else value


def _loads_of(mix: str, found: Mapping[str, Any], where: str) -> list[Load]:
    """One load, or one for each of its `rates`."""
    given = dict(found)
    rates = given.pop("rates", None)
    if rates is None:
        return [Load.parse(mix, {"mix": mix, **given}, where)]
    return [
        Load.parse(f"{mix}, {rate}", {**given, "mix": mix, "rate": rate}, where) for rate in rates
    ]


def _parsed(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in given:
        _require(name in fields, where, "a key", name, fields)
    try:
        return kind(**given)
    except TypeError as error:
        raise SpecError(f"{where}: {error}") from error


def _require(holds: bool, where: str, what: str, found: Any, allowed: Any) -> None:
    if not holds:
        raise SpecError(f"{where}: {what} is {found!r}, allowed: {', '.join(map(str, allowed))}")
