"""The comparison of dispatchers on a small recording."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.cluster import command
from bench.cluster.loads import load_named
from bench.cluster.routers import ROUTERS
from bench.workloads.prompts import WorkloadError
from tests.bench.recordings import azure_like


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return azure_like(tmp_path_factory.mktemp("data"))


def asked(data: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(["--data", str(data), "--loads", "azure", *more])


def test_every_dispatcher_has_its_row(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs.jsonl"
    few = ("--nodes", "3", "--rates", "1.2", "--seeds", "2", "--per-node", "8")
    assert command.run(asked(data, *few, "--output", str(output))) == 0
    table = capsys.readouterr().out
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(ROUTERS)
    runs = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(runs) == 2 * len(ROUTERS)
    assert all(0 <= run["missed_tdg"] <= 1 for run in runs)
    assert command.run(asked(data, *few, "--dispatch", runs[0]["dispatch"], "--json")) == 0
    assert json.loads(capsys.readouterr().out) == runs[:2]
    # The ratio is to the best of the stock ones.
    assert min(float(row.split("|")[-2]) for row in rows[2:]) == 1.0


def test_seeds_and_halves_of_tuning_and_reports_are_apart(data: Path) -> None:
    reported, tuned = (load_named("azure", data, tuning=tuning) for tuning in (False, True))
    assert reported.requests(1.0, 20, 1000) != tuned.requests(1.0, 20, 1000)
    assert not set(command._seeds(asked(data))) & set(command._seeds(asked(data, "--tuning")))


def test_what_is_not_there_is_said(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkloadError):
        load_named("agents", data, tuning=False)
    assert command.run(asked(data, "--report-s", "0")) == 2
    assert "--report-s is 0.0, allowed: above 0" in capsys.readouterr().err
