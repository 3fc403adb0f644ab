"""Lists the public data that workloads read, and checks a folder for it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from predictor_store.logs.errors import DatasetError, RowError
from predictor_store.logs.rows import raw_rows

_FILE = Path(__file__).with_name("data.toml")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of the folder that --data names.

    origin: where its publisher offers the data. num_rows, size_mb: of the file that the records
    were made with. fields: the fields that workloads read.
    """

    name: str
    title: str
    origin: str
    licence: str
    num_rows: int
    size_mb: float
    fields: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"{self.name}.jsonl.gz"

    def problem_in(self, folder: Path) -> str:
        """Return why the file in this folder cannot be used; "" if it can."""
        if not (folder / self.path).is_file():
            return "missing"
        has, num_rows = set[str](), 0
        try:
            for place, row in raw_rows(str(folder / self.path)):
                if isinstance(row, RowError) or not isinstance(row, dict):
                    return f"{place} is not a JSON object"
                has |= {field for field in self.fields if row.get(field) is not None}
                num_rows += 1
        except DatasetError as error:
            return str(error)
        if lacking := [field for field in self.fields if field not in has]:
            return f"no row has {', '.join(lacking)}"
        return f"{num_rows} rows, not {self.num_rows}" if num_rows != self.num_rows else ""


@cache
def data_files() -> Mapping[str, DataFile]:
    """Return all files by name."""
    found = _read()["files"]
    return {
        name: DataFile(
            name, row["title"], row["from"], row["licence"], row["rows"], row["mb"],
            tuple(row["fields"]),
        )
        for name, row in found.items()
    }  # fmt: skip


def files_of(workload: str, arrivals: str) -> Collection[str]:
    """Return the names of the files that a workload and its arrival times read."""
    needs: list[str] = list(_read()["workloads"].get(workload, ()))
    return dict.fromkeys([*needs, *_read()["arrivals"].get(arrivals, ())])


@cache
def _read() -> dict[str, Any]:
    with _FILE.open("rb") as file:
        return tomllib.load(file)
