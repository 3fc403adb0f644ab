"""The comparison by deadlines on a small recording; what defines each rival."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.slo import command
from bench.slo.lengths import read_lengths
from bench.slo.rivals import RIVALS, rival
from bench.slo.runs import ABLATIONS, OURS, STOCK, Setting, numbers_of
from bench.workloads.prompts import WorkloadError
from sage_sched.job import Hints, Job
from sage_sched.order import serving_order
from tests.bench.recordings import azure_like
from tests.sage_sched.strategies import SERVER, waiting

HIGH = Hints(weight=2.0, ttft_slo_ms=5000.0, tpot_slo_ms=100.0, slo_class="high")
LOW = Hints(weight=1.0, ttft_slo_ms=1000.0, tpot_slo_ms=100.0, slo_class="low")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return azure_like(tmp_path_factory.mktemp("data"))


def job(arrival: int, hints: Hints) -> Job:
    return Job(arrival, 100, 100, None, 0, hints=hints)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("sarathi-fcfs", [0, 1]),
        ("sarathi-priority", [1, 0]),
        ("edf", [0, 1]),
        ("fairbatching", [0, 1]),
    ],
)
def test_the_order_of_each_rival(name: str, order: list[int]) -> None:
    assert serving_order(rival(name, SERVER), waiting(job(0, LOW), job(1, HIGH))) == order
    if name == "edf":
        assert serving_order(rival(name, SERVER), waiting(job(0, HIGH), job(1, LOW))) == [1, 0]


def test_weighted_vtc_serves_the_class_that_has_had_least_for_its_weight() -> None:
    vtc = rival("weighted-vtc", SERVER)
    high, low = job(0, HIGH), job(1, LOW)
    both = replace(waiting(job(2, HIGH), job(3, LOW)), running=[high, low])
    high.served_tokens, low.served_tokens = 150, 100
    vtc.on_pass(both)
    assert serving_order(vtc, both) == [0, 1]  # 150 over 2, against 100
    high.served_tokens = 250
    vtc.on_pass(both)
    assert serving_order(vtc, both) == [1, 0]


def test_fairbatching_prefills_as_much_as_the_slack_of_those_that_run_allows() -> None:
    running = replace(HIGH, ttft_slo_ms=1000.0)
    ahead, on_time = job(0, running), job(1, running)
    ahead.grow(40)
    on_time.grow(2)
    ours = rival("fairbatching", SERVER)
    view = waiting(job(2, LOW))
    much = ours.budget(replace(view, running=[ahead], now_s=1.0))
    little = ours.budget(replace(view, running=[ahead, on_time], now_s=1.15))
    assert much is not None
    assert little is not None
    assert (much.prefill_tokens or 0) > 10 * (little.prefill_tokens or 0) > 0


def test_each_policy_serves_all(data: Path) -> None:
    setting = Setting(read_lengths(data, "azure", held_out=False))
    requests = setting.requests(3.0, 40, seed=5)
    for policy in (*STOCK, "fcfs/unmixed", *RIVALS, "sage", *OURS, *ABLATIONS):
        numbers = numbers_of(setting.served(policy, requests), "w1")
        assert 0 <= numbers["tdg_ratio"] <= 1, policy
        assert set(numbers["tdg_ratio_by_class"]) == {"w1", "w2"}


def test_what_is_reported_on_was_not_tuned_on(data: Path) -> None:
    tuned = read_lengths(data, "azure", held_out=False)
    reported = read_lengths(data, "azure", held_out=True)
    known = set(zip(*(column.tolist() for column in tuned.history), strict=True))
    for lengths in (tuned, reported):
        assert not known & set(
            zip(lengths.input_tokens.tolist(), lengths.output_tokens.tolist(), strict=True)
        )
    assert sorted(tuned.input_tokens.tolist()) != sorted(reported.input_tokens.tolist())
    with pytest.raises(WorkloadError):
        read_lengths(data / "nowhere", "azure", held_out=True)


def test_the_command_prints_a_table(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    written = data / "runs.jsonl"
    words = f"--data {data} --lengths azure --policies fcfs proserve-expected --rates 1.5 --seeds 2"
    words += f" --num-requests 30 --output {written}"
    assert command.run(parser.parse_args(words.split())) == 0
    table = capsys.readouterr().out
    assert "| `proserve-expected` | " in table
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert [(row["policy"], row["seed"]) for row in rows] == [
        (policy, seed) for policy in ("fcfs", "proserve-expected") for seed in range(2)
    ]
    assert command.run(parser.parse_args([*words.split(), "--json"])) == 0
    assert json.loads(capsys.readouterr().out) == rows
    assert command.run(parser.parse_args(["--data", str(data / "nowhere")])) == 2
