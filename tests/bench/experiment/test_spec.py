"""Experiments as files: their keys. A new one takes no code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.experiment import records, run_command
from bench.experiment.records import Record, read
from bench.experiment.run import changed
from bench.experiment.spec import Experiment, Load, Options, names
from bench.policies.arm import Arm
from bench.workloads.arrivals import requests_per_s
from sage_sched.cli import main
from sage_sched.fields import ConfigError
from tests.bench.experiment.runs import on_server

NEW = """
title = "Two policies under a load of my own"
arms = ["fcfs@clip=256", {policy = "sage", label = "ours", settings.policy.sage.regret = 2.0}]

[loads.crowded]
workload = "two kinds"
rate = 40
arrivals = "batch"
num_requests = 120
max_new_tokens = 128
engine = {max_running_requests = 8}
"""


def test_a_new_experiment_is_under_twenty_lines_of_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(NEW, encoding="utf-8")
    command = f"bench run {tmp_path / 'mine.toml'} --seeds 2 --output {tmp_path}"
    assert main(command.split()) == 0
    told = capsys.readouterr().out
    labels = [line.split("`")[1] for line in told.splitlines() if "`" in line]
    assert labels == ["fcfs@clip=256", "ours"]
    found = read(tmp_path / "records" / "mine.jsonl")
    assert len(found) == 2 * 2
    # New records replace the old ones of the same run.
    assert main(command.split()) == 0
    assert read(tmp_path / "records" / "mine.jsonl") == found


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"arms": []}, "at least one policy"),
        ({"arms": ["fcfs@clip=none"]}, "clip is"),
        ({"arms": ["sage", "sage"]}, "one of each label"),
        ({"arms": [{"policy": "sage", "settings": {"policy": {"sage": {"x": 1}}}}]}, "x"),
        ({"arms": [{"policy": "sage", "colour": "red"}]}, "'colour', allowed: policy"),
        ({"defaults": {"arrivals": "often"}}, "'often', allowed: pulse"),
        ({"defaults": {"rate": "fast"}}, "multiple"),
        ({"defaults": {"engine": {"wheels": 4}}}, "'wheels', allowed"),
    ],
)
def test_a_wrong_key_says_where_and_the_allowed_ones(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.parse("any", {"title": "", "arms": ["sage"], **wrong})


def test_a_load_has_the_defaults_that_it_does_not_change() -> None:
    defaults = {"rate": 3, "max_new_tokens": 9, "engine": {"slices": 4}}
    loads = {"a": {"rates": ["1x", 2]}, "b": {"rate": "4x", "workload": "chats"}}
    found = Experiment.parse(
        "any",
        {"title": "", "arms": ["sage"], "first_seed": 5, "defaults": defaults, "loads": loads},
    )
    same = {"max_new_tokens": 9, "engine": {"slices": 4}}
    chats = Load(name="b", mix="b", rate="4x", workload={"name": "chats"}, **same)
    swept = [Load(name=f"a, {rate}", mix="a", rate=rate, **same) for rate in ("1x", "2")]
    assert (found.loads, found.sweeps, found.all_seeds) == ([*swept, chats], True, range(5, 8))
    assert chats.engine_of(Arm(policy="qllm", engine={"slices": 2})).slices == 2


def test_rates_are_absolute_or_of_the_capacity() -> None:
    assert (requests_per_s("3.5", 2.0), requests_per_s("0.5x", 3.0)) == (3.5, 1.5)
    for wrong in ("0", "-1x", "x", "2y", "nan", "inf"):
        with pytest.raises(ConfigError, match="allowed"):
            requests_per_s(wrong, capacity=1.0)


def test_only_valid_runs_are_kept_and_for_pages_without_their_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = [on_server("sage", 0), on_server("sage", 1, problem="late")], list[Any]()

    def run(*of: Any) -> list[Record]:
        asked.append(of[:2])
        return [*map(of[2], made)] and made

    monkeypatch.setattr(run_command, "run_experiment", run)
    monkeypatch.setattr(records, "FOLDER", tmp_path / "pages")
    for more, folder, about in (
        ([], tmp_path / "records", made[0].about), (["--record"], tmp_path / "pages", {}),
    ):  # fmt: skip
        command = ["bench", "run", "gaps", "--output", str(tmp_path), *more]
        assert main(command) == 1
        (kept,) = read(folder / "gaps.jsonl")
        assert (kept.seed, kept.about) == (0, about)
    assert "invalid: sage, 2x, seed 1: late" in capsys.readouterr().err
    more = "--json --engine clock --seeds 7 --arms lpm --jobs 3 --data d --model-path m"
    assert main([*command, *more.split(), "--server-flags", "--x 1"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 2
    gaps = changed(Experiment.read("gaps"), engine="clock", seeds=7, arms=["lpm"])
    options = Options(
        data=Path("d"), output=tmp_path, model=Path("m"), jobs=3, server_flags=["--x", "1"]
    )
    assert asked[-1] == (gaps, options)


def test_keys_of_an_experiment_are_set_for_all_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, made = list[Any](), [on_server("lpm", 0), on_server("lpm", 1, problem="late")]
    monkeypatch.setattr(run_command, "run_experiment", lambda *of: asked.append(of[0]) or made)
    (tmp_path / "sage.toml").write_text("policy.sage.regret = 3.0")
    command = (
        f"bench run compare --output {tmp_path} --arms lpm --sage-config {tmp_path / 'sage.toml'} "
        "--set rates=[3,'0.5x'] arrivals=batch num_requests=40 preset=h100-llama-3.1-8b speed=2.5"
    )
    assert main(command.split()) == 1
    said = capsys.readouterr().out
    assert "device clock: h800-qwen3-32b, 2 times" in said
    assert "seed 1: late" in (tmp_path / "compare" / "report.html").read_text()
    loads = [
        Load(
            name=rate, rate=rate, workload={"name": "generated", "as_servers": True},
            arrivals="batch", num_requests=40, max_new_tokens=2048, preset="h100-llama-3.1-8b",
        )
        for rate in ("3", "0.5x")
    ]  # fmt: skip
    (found,) = asked
    assert (found.loads, found.speed, found.seeds) == (loads, 2.5, 5)
    assert found.arms[0].config.policy["sage"].regret == 3.0
    gaps = Experiment.read("gaps")
    assert {load.rate for load in Experiment.read("gaps", {"rate": 9}).loads} == {"9"}
    assert Experiment.read("gaps", {"first_seed": 9}) == replace(gaps, first_seed=9)
    for wrong in ("rates=[]", "rates=x", "wheels=4", "speed=fast"):
        assert main(["bench", "run", "compare", "--set", wrong]) == 2


def test_an_experiment_may_be_like_another(tmp_path: Path) -> None:
    """It has the other's keys and defaults, except its own."""
    like = 'like = "slo"\nwithout = ["fcfs"]\nseeds = 9\ndefaults.num_requests = 5\n'
    (file := tmp_path / "mine.toml").write_text(like)
    slo, found = Experiment.read("slo"), Experiment.read(str(file))
    assert found == replace(
        slo, name="mine", seeds=9, arms=[arm for arm in slo.arms if arm.name != "fcfs"],
        loads=[replace(load, num_requests=5) for load in slo.loads],
    )  # fmt: skip
    file.write_text(like.replace('"fcfs"', '"none"'))
    with pytest.raises(ConfigError, match=r"mine\.without 'none'"):
        Experiment.read(str(file))


def test_experiments_are_listed_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names()
    assert main(["bench", "list", "--json"]) == 0
    titles = {name: Experiment.read(name).title for name in names()}
    assert json.loads(capsys.readouterr().out) == titles
    assert main(["bench", "run", "nothing"]) == 2
