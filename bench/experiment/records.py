"""Reads and writes records. A record is the result of a run as a line of JSON. Tables and pictures
are made from records."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from bench.engines.server import facts
from sage_sched.fields import ConfigError

FOLDER = Path(__file__).parents[1] / "records"
METRIC_LISTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
)
_VERSIONS = ("sglang", "torch", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a record. commit: the code's, "" outside a checkout."""

    commit: str = ""
    command: str = ""
    versions: str = ""
    host: str = ""

    @classmethod
    def of_now(cls) -> Self:
        """Return the origin of a record that this process makes."""
        # Paths of this machine mean nothing elsewhere.
        words = [word if not Path(word).is_absolute() else "PATH" for word in sys.argv[1:]]
        return cls(
            commit=facts.commit(),
            command=shlex.join(["sage-sched", *words]),
            versions=", ".join(
                f"{name} {found}" for name in _VERSIONS if (found := facts.version_of(name))
            ),
            host=f"{os.cpu_count()} cores",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run of an arm under a load.

    engine: sim, clock or server.
    metrics: by the names of SGLang's bench_serving if it has one (docs/benchmarking.md).
    problem: why a run on servers must not be counted, or "".
    about: the settings, counters and requests of a run on servers; bench/records leaves them out.
    """

    experiment: str
    load: str
    arm: str
    policy: str
    seed: int
    engine: str
    metrics: Mapping[str, float]
    made_by: Provenance = field(default_factory=Provenance)
    problem: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """The key that a newer record of the same run shares."""
        return self.experiment, self.load, self.arm, self.seed, self.engine

    @classmethod
    def parse(cls, line: str) -> Self:
        """Return the record of a line. Raises ValueError."""
        try:
            found = json.loads(line)
            return cls(**{**found, "made_by": Provenance(**found["made_by"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"is no record: {error!r}") from error

    def line(self) -> str:
        """Return the line that parse reads, with metrics to five digits."""
        rounded = {name: float(f"{value:.5g}") for name, value in self.metrics.items()}
        fields = asdict(replace(self, metrics=rounded))
        return json.dumps({k: v for k, v in fields.items() if v or k not in ("problem", "about")})


def file_of(experiment: str, folder: Path = FOLDER) -> Path:
    """Return the file of an experiment's records."""
    return folder / f"{experiment}.jsonl"


def read(file: Path) -> list[Record]:
    """Return the records in order; none if there is no file. Raises ConfigError with the faulty
    line."""
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(Record.parse(line))
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
    return records


def write(file: Path, new: Sequence[Record]) -> None:
    """Add records to a file. A newer record of the same run replaces the older."""
    kept = {record.key: record for record in (*read(file), *new)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(record.line() + "\n" for record in kept.values()), encoding="utf-8")


def of_metrics(metrics: Mapping[str, Any], columns: Iterable[str]) -> dict[str, float]:
    """Return the metrics that a record keeps, and these columns."""
    wanted = dict.fromkeys((*METRIC_LISTS["kept"], *columns))
    return {name: float(metrics[name]) for name in wanted if name in metrics}
