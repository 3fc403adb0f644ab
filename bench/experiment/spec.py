"""Reads an experiment from a TOML file: arms under loads, with seeds (docs/benchmarking.md)."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from bench.policies.arm import Arm
from bench.simulator.presets import PRESETS, Engine
from bench.workloads.arrivals import LOADS, RECORDED, RUSH, requests_per_s
from sage_sched.fields import ConfigError, hints_of, parse_section, require, require_known

FOLDER = Path(__file__).parents[1] / "experiments"
# The value of capacity_by for the best setting of SGLang's policies.
TUNED = "tuned"
ENGINES = ("sim", "clock", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One column of an experiment.

    workload: a name of bench.workloads.sources, or a table of it and its options.
    rate: requests per second, or "2x" for twice the rate that capacity_by sustains.
    mix: the loads of one mix differ only in their rate.
    arrivals: one of bench.workloads.arrivals.LOADS, RECORDED, or RUSH.
    num_requests: the requests of a run; None: as many as the kind of arrivals has.
    preset, engine: the preset of the engine, and the fields that differ from it.
    nodes: the number of engines.
    apart: whether prefill and decode are separate: `nodes` engines prefill, and as many others
        decode.
    capacity_by: a policy, or TUNED for the best setting of the experiment's tuning.
    measured: results cover the requests between two shares of the arrivals, which leaves out the
        beginning of a queue and its drain.
    ttft_slo_ms, tpot_slo_ms: the SLO of a good request.
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
        """Return the engine of an arm."""
        engine = PRESETS[self.preset]
        return dataclasses.replace(engine, **{**self.engine, **arm.engine})

    @classmethod
    def parse(cls, name: str, found: Mapping[str, Any], where: str) -> Self:
        """Return the load of a table. Raises ConfigError."""
        given = dict(found)
        if isinstance(given.get("workload"), str):
            given["workload"] = {"name": given["workload"]}
        if "rate" in given:
            given["rate"] = f"{given['rate']}"
        load: Self = parse_section(cls, where, given, name=name)
        require_known({load.preset: None}, PRESETS, f"preset of {where}")
        require_known(
            {load.arrivals: None}, dict.fromkeys((*LOADS, RECORDED, RUSH)), f"arrivals of {where}"
        )
        require_known(load.engine, hints_of(Engine), f"field of {where}.engine")
        requests_per_s(load.rate, 1.0)
        return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """SGLang's policies, each with each of the clips (bench.policies.rival). The best setting is
    the experiment's first arm.

    by: the metric that the best setting minimizes; `good_share` is maximized.
    seeds: different from the seeds of reports.
    rates: if given, one setting is chosen for all loads of a mix, by its results at these rates
        ("1x": the rate that fcfs-fill sustains). If empty, each load has its own best setting.
    """

    policies: Sequence[str]
    clips: Sequence[int]
    by: str = "mean_e2e_latency_ms"
    seeds: Sequence[int] = (11, 12)
    rates: Sequence[str] = ()

    def arms(self) -> list[Arm]:
        """Return all arms to try."""
        tried = product(self.policies, self.clips)
        return [Arm(policy=f"{policy}@clip={clip}") for policy, clip in tried]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Arms under loads.

    A file may name another experiment as `like`, whose keys it has as well, and its arms that it
    is `without`.

    name: the file's name.
    arms: ratios are to the first, or to `reference`.
    columns: further columns of the table (see bench.experiment.run.measured).
    seeds: the number of seeds, from first_seed on.
    """

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
    def metrics(self) -> tuple[str, ...]:
        """The metrics of its table."""
        return (*self.columns, *self.ratios)

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def sweeps(self) -> bool:
        """Whether its mixes have several rates."""
        return any(load.mix != load.name for load in self.loads)

    @classmethod
    def read(cls, name_or_file: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Return an experiment of FOLDER, or from a file of your own. Raises ConfigError.

        changes: keys of the experiment, and of all its loads, with their values.
        """
        return cls.parse(Path(name_or_file).stem, _table(name_or_file), changes)

    @classmethod
    def parse(
        cls, name: str, found: Mapping[str, Any], changes: Mapping[str, Any] = MappingProxyType({})
    ) -> Self:
        """Parse a table. Raises ConfigError with the place and the allowed values. changes: see
        read."""
        of_loads = {key: value for key, value in changes.items() if key not in hints_of(cls)}
        if "rate" in changes:
            of_loads["rates"] = None
        given = {**found, **{key: changes[key] for key in changes if key not in of_loads}}
        defaults = given.pop("defaults", {})
        loads = given.pop("loads", {}) or {"": {}}
        arms = [Arm.parse(arm, f"{name}.arms") for arm in given.pop("arms", ())]
        tuned = given.pop("tuned", None)
        labels, without = [arm.name for arm in arms], given.pop("without", ())
        require_known(dict.fromkeys(without), dict.fromkeys(labels), f"arm in {name}.without")
        arms = [arm for arm in arms if arm.name not in without]
        require(bool(arms), f"{name}.arms", arms, "at least one policy")
        require(len(labels) == len({*labels}), f"{name}.arms", labels, "one of each label")
        return parse_section(  # type: ignore[no-any-return]
            cls,
            name,
            given,
            name=name,
            arms=arms,
            tuned=None if tuned is None else parse_section(Tuning, f"{name}.tuned", tuned),
            loads=[
                load
                for mix, differs in loads.items()
                for load in _loads_of(
                    mix, {**defaults, **differs, **of_loads}, f"{name}.loads.{mix}"
                )
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run.

    data: the folder of datasets.
    output: for all files that servers write.
    jobs: parallel simulations.
    model: the model of the servers; None for a small one.
    server_flags: flags of SGLang; None for CPU_FLAGS.
    server_env: the servers' environment, if server_flags are given.
    """

    data: Path | None = None
    output: Path = Path("results")
    model: Path | None = None
    jobs: int = 1
    server_flags: Sequence[str] | None = None
    server_env: Mapping[str, str] = field(default_factory=dict)


def _table(name_or_file: str, *likes: str) -> dict[str, Any]:
    """Return the table of an experiment, with all keys of the experiment that it is like. Raises
    ConfigError. likes: the experiments that are like this one."""
    require(name_or_file not in likes, "like", name_or_file, "an experiment unlike this one")
    file = FOLDER / f"{name_or_file}.toml"
    if name_or_file.endswith(".toml"):
        file = Path(name_or_file)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"there is no experiment {name_or_file!r}, known: {', '.join(names())}"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    if (like := found.pop("like", None)) is None:
        return found
    other = _table(f"{like}", *likes, name_or_file)
    defaults = {**other.get("defaults", {}), **found.get("defaults", {})}
    return {**other, **found, "defaults": defaults}


def names() -> list[str]:
    """Return the names of all experiments that come with this package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def _loads_of(mix: str, found: Mapping[str, Any], where: str) -> list[Load]:
    """Return one load, or one for each of its `rates`. A load without a name has its rate's."""
    given = dict(found)
    rates = given.pop("rates", None)
    if rates is None:
        name = mix or f"{given.get('rate', '2x')}"
        return [Load.parse(name, {"mix": name, **given}, where)]
    require(isinstance(rates, list) and bool(rates), f"{where}.rates", rates, "a list of rates")
    return [
        Load.parse(f"{mix}, {rate}".removeprefix(", "), {**given, "mix": mix, "rate": rate}, where)
        for rate in rates
    ]
