"""The findings of `sage-sched bench data` about folders."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.simulator.presets import PRESETS, Engine
from bench.workloads.catalogue import data_files, files_of
from bench.workloads.prompts import WorkloadError
from bench.workloads.sources import NAMES, source_of
from sage_sched.cli import main


def write(folder: Path, name: str, *rows: object) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no row has prompt_len, output_len"),
        ([{"prompt_len": 3, "output_len": 4}], "1 rows, not 238"),
        ([{"prompt_len": 3}], "no row has output_len"),
        ([{"prompt_len": 3, "output_len": 4}, [1]], "2 is not a JSON object"),
        ([{"prompt_len": 3, "output_len": 4}] * 238, ""),
    ],
)
def test_a_file_is_usable_or_a_reason_is_given(
    rows: list[object], said: str, tmp_path: Path
) -> None:
    file = data_files()["semsched_priority_lengths"]
    assert file.problem_in(tmp_path) == "missing"
    write(tmp_path, file.name, *rows)
    problem = file.problem_in(tmp_path)
    assert said in problem if said else not problem


def test_a_folder_can_run_some_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "trace_agentic_coding", {"session": "a", "requests": []})
    assert main(["bench", "data", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "agents" in said.partition("can run: ")[2].partition("\n")[0].split(", ")
    assert "urgency lacks semsched_priority_lengths, urgency_ktas" in said
    assert main(["bench", "data", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["file"] for row in listed} == {file.path for file in data_files().values()}
    assert all(row["licence"] and row["experiments"] for row in listed)
    assert main(["bench", "data", str(tmp_path / "absent")]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_list_names_what_a_workload_reads_first(name: str, tmp_path: Path) -> None:
    engine: Engine = PRESETS["h800-qwen3-32b"]
    needs = files_of(name, "pulse")
    if not needs:
        return
    with pytest.raises(WorkloadError) as error:
        source_of({"name": name}, engine, tmp_path)
    assert any(file in str(error.value) for file in needs)
