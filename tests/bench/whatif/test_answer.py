"""A log under several policies, and how sure of it one may be."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines.simulator.presets import PRESETS
from bench.whatif.answer import answer_of
from bench.whatif.comparison import compare, good_table, sentence
from bench.whatif.engine import OwnServer, of_info, of_preset, of_running
from bench.whatif.foresight import Foresight
from bench.whatif.log import Logged, TrafficLog
from bench.whatif.simulation import Outcome, Slo, outcomes, requests_of
from bench.whatif.told import Told, told_of
from bench.workloads.prompts import WorkloadError
from bench.workloads.supposed import Supposed
from predictor_store.store.file import StoreError
from sage_sched.cli import main
from sage_sched.config import SageConfig, StepTimeConfig
from sage_sched.distribution import LengthDistribution
from sage_sched.fields import UserError

CONFIG = SageConfig()
SMALL = OwnServer(
    replace(PRESETS["h800-qwen3-32b"], kv_pool_tokens=4096, max_running_requests=8), "", "small"
)


def traffic(num_requests: int = 120, prompt: str = "") -> TrafficLog:
    """More than the small engine serves, short and long answers mixed."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.4, num_requests))
    lengths = np.where(rng.random(num_requests) < 0.7, 20, 300)
    requests = [
        Logged(float(at), 50, int(length), 400, prompt=prompt and f"{prompt} {length}")
        for at, length in zip(arrivals, lengths, strict=True)
    ]
    return TrafficLog(tuple(requests), "made up")


def test_without_prompts_the_interval_tells_of_better_and_worse_predictions() -> None:
    answer = answer_of(traffic(), SMALL, ["fcfs", "sage"], CONFIG, num_seeds=2)
    fcfs, sage = answer.rows
    assert (fcfs.mean_ratio.low, fcfs.mean_ratio.value, fcfs.mean_ratio.high) == (1.0, 1.0, 1.0)
    assert sage.mean_ratio.low < sage.mean_ratio.value < sage.mean_ratio.high
    assert sage.mean_ratio.value == pytest.approx(sage.mean_ttlt_s / fcfs.mean_ttlt_s)
    assert any("120 supposed" in note for note in answer.notes)
    said = sentence(answer.rows, "sage")
    assert f"mean TTLT {sage.mean_ratio}" in said
    assert "tokens/s" in said
    as_now = sentence(answer.rows, "fcfs")
    assert as_now.startswith(f"Under fcfs, as now: mean TTLT {fcfs.mean_ttlt_s:.2f} s")
    assert f"sage: mean {sage.mean_ratio} of that" in as_now
    assert sentence(answer.rows, "hrrn") == ""
    known = replace(SMALL, crps_gain=0.4)
    surer = answer_of(traffic(), known, ["fcfs", "sage"], CONFIG, num_seeds=2).rows[1].mean_ratio
    assert surer.high - surer.low < sage.mean_ratio.high - sage.mean_ratio.low


def test_good_requests_get_fewer_the_faster_they_come() -> None:
    answer = answer_of(
        traffic(), SMALL, ["fcfs", "sage"], CONFIG,
        num_seeds=1, multiples=(0.1, 1.0, 4.0), slo=Slo(ttft_ms=2000.0),
    )  # fmt: skip
    for shares in answer.good.values():
        assert shares[0] == 1.0
        assert shares[2] < 0.95
    assert answer.good["sage"][2] > answer.good["fcfs"][2]
    lenient = answer_of(traffic(), SMALL, ["fcfs"], CONFIG, multiples=(4.0,), slo=Slo(1e9, 1e9))
    assert lenient.good == {"fcfs": [1.0]}
    lines = good_table({"fcfs": [1.0, 0.9], "sage": [1.0, 1.0], "hrrn": [0.5, 0.4]}, (1, 2))
    said = {line.split()[0]: line.split("  ")[-1].strip() for line in lines.splitlines()[2:]}
    assert said == {"fcfs": "1.50x", "sage": "2.00x or more", "hrrn": "less than 1x"}


def test_the_interval_narrows_with_a_longer_log_and_is_the_same_each_time() -> None:
    """Of results that differ by chance from request to request."""

    def width(num_requests: int) -> float:
        simulated = requests_of(SMALL.engine, traffic(num_requests).requests, None)
        told = Told(([None] * num_requests,), 1, "", {})
        made = outcomes(SMALL.engine, ["fcfs"], simulated, told, CONFIG)[0]
        rng = np.random.default_rng(2)
        two = [
            replace(made.results[0], ttlt_s=rng.exponential(0.4, num_requests) + 9) for _ in "ab"
        ]
        rows = compare([Outcome(name, (one,), 1) for name, one in zip("ab", two, strict=True)])
        assert rows == compare([Outcome(n, (r,), 1) for n, r in zip("ab", two, strict=True)])
        return rows[1].mean_ratio.high - rows[1].mean_ratio.low

    assert 0 < width(1000) < 0.6 * width(100)


def test_supposed_predictions_are_as_good_as_asked_and_calibrated() -> None:
    lengths = np.random.default_rng(3).lognormal(5, 1, 1500).astype(int) + 1
    supposed = Supposed(lengths.tolist())
    everything = LengthDistribution.from_samples(lengths, "prior")
    blind = np.mean([everything.crps(int(length)) for length in lengths])
    for gain in (0.1, 0.3, 0.6):
        said = supposed.predictions(gain, seed=1)
        crps = np.mean([one.crps(int(n)) for one, n in zip(said, lengths, strict=True)])
        assert 1 - crps / blind == pytest.approx(gain, abs=0.05)
        within = np.mean([p.has_within(int(n), 0.8) for p, n in zip(said, lengths, strict=True)])
        assert 0.75 < within < 0.9
    assert supposed.predictions(0.3, 1) != supposed.predictions(0.3, 2)


def test_a_prompt_is_foreseen_by_answers_that_had_ended_and_by_no_other(tmp_path: Path) -> None:
    requests = [
        Logged(float(i), 9, 700 if i < 40 else 3, prompt=f"Name a colour, please: {i}")
        for i in range(80)
    ]
    never = Foresight(CONFIG, None).predictions(requests, [1e9] * 80)
    soon = Foresight(CONFIG, None)
    learned = soon.predictions(requests, [i + 0.5 for i in range(80)])
    assert all(found is not None for found in (*never, *learned))
    means = [found.mean() for found in learned if found is not None]
    unlearned = [found.mean() for found in never if found is not None]
    assert max(unlearned) < 1.5 * min(unlearned)
    assert means[39] > 400
    assert means[79] < means[39] / 2
    assert soon.quality()["num_answers"] > 50
    with pytest.raises(StoreError, match="there is no store"):
        Foresight(CONFIG, tmp_path)


def test_each_request_is_told_by_the_best_that_there_is_of_it() -> None:
    said = LengthDistribution.from_samples([7], "history")
    requests = [
        Logged(0.0, 9, 20, 400, forecast=said, prompt="Why?"),
        Logged(1.0, 9, 30, 400, prompt="How?"),
        Logged(2.0, 9, 40, 400),
    ]
    told = told_of(requests, SMALL.engine, CONFIG, store=None, gain=None, num_seeds=2)
    assert len(told.variants) == 6
    assert all(variant[0] is said for variant in told.variants)
    assert len({id(variant[1]) for variant in told.variants}) == 1
    assert "1 recorded in shadow mode, 1 made from prompts, 1 supposed" in told.description
    few = [*[replace(requests[0], arrival_s=float(i)) for i in range(40)], requests[2]]
    told = told_of(few, SMALL.engine, CONFIG, store=None, gain=None, num_seeds=2)
    assert len(told.variants) == 1
    assert told.description == "40 recorded in shadow mode, 1 of all lengths"
    told = told_of(requests[:2], SMALL.engine, CONFIG, store=None, gain=None, num_seeds=2)
    assert len(told.variants) == 1


def test_what_does_not_fit_the_engine_is_left_out_and_said() -> None:
    log = traffic()
    longer = replace(log, requests=(*log.requests, Logged(log.arrivals_s, 4000, 200, 400)))
    answer = answer_of(longer, SMALL, ["fcfs"], CONFIG)
    assert any("1 requests that are too long" in note for note in answer.notes)
    with pytest.raises(WorkloadError, match="4096 tokens"):
        answer_of(replace(log, requests=longer.requests[-1:]), SMALL, ["fcfs"], CONFIG)


def test_it_says_where_the_simulation_is_far_from_what_the_log_tells() -> None:
    log = traffic()
    simulated_s = answer_of(log, SMALL, ["fcfs"], CONFIG).rows[0].mean_ttlt_s
    for ttlt_s, far in ((simulated_s, False), (3 * simulated_s, True)):
        told = replace(log, requests=tuple(replace(r, ttlt_s=ttlt_s) for r in log.requests))
        notes = "\n".join(answer_of(told, SMALL, ["fcfs"], CONFIG).notes)
        assert ("far off" in notes) == far
        assert f"{ttlt_s:.2f} s by the log" in notes


INFO: dict[str, Any] = {
    "max_total_num_tokens": 5003, "page_size": 16, "chunked_prefill_size": 2048,
    "max_prefill_tokens": 16384, "schedule_policy": "lpm", "schedule_conservativeness": 0.3,
    "enable_mixed_chunk": True, "dp_size": 1,
    "internal_states": [{
        "effective_max_running_requests_per_dp": 32, "memory_usage": {"kvcache": 1.25},
        "sage": {
            "step_time": {**asdict(StepTimeConfig()), "source": "learned", "num_steps": 9},
            "preemption": {"swap_token_us": 3.0, "host_pool_tokens": 7000},
            "predictor": {"quality": {"num_answers": 400, "crps_gain": 0.31}},
        },
    }],
}  # fmt: skip


def test_an_engine_is_what_its_server_says() -> None:
    server = of_info(INFO, None, "info")
    engine = server.engine
    assert (engine.kv_pool_tokens, engine.page_size, engine.max_running_requests) == (4992, 16, 32)
    assert (engine.chunked_prefill_size, engine.schedule_conservativeness) == (2048, 0.3)
    assert (engine.mixed_chunk, engine.swap_token_s) == (True, 3e-6)
    assert engine.host_pool_tokens == 7000
    assert engine.step_time == StepTimeConfig().step_time()
    assert (server.policy, server.crps_gain) == ("lpm", 0.31)
    assert "learned" in server.description
    other = of_info({**INFO, "schedule_policy": "random"}, None, "info")
    assert other.policy == ""
    assert "its policy, random, cannot be simulated" in other.description
    stock = {**INFO, "internal_states": [{**INFO["internal_states"][0], "sage": None}]}
    with pytest.raises(WorkloadError, match="--step-time"):
        of_info(stock, None, "info")
    given = PRESETS["h100-llama-3.1-8b"].step_time
    assert of_info(stock, given, "info").engine.step_time == given
    with pytest.raises(WorkloadError, match="dp_size is 2"):
        of_info({**INFO, "dp_size": 2}, None, "info")
    with pytest.raises(WorkloadError, match="max_prefill_tokens"):
        of_info({name: v for name, v in INFO.items() if name != "max_prefill_tokens"}, None, "x")


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(INFO).encode())

        def log_message(self, *args: object) -> None:
            pass

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_a_running_server_is_asked(url: str) -> None:
    assert of_running(url, None).engine == of_info(INFO, None, "").engine
    with pytest.raises(UserError, match="/server_info answers 404"):
        of_running(url + "nothing", None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{r.arrival_s},{r.input_tokens},{r.output_tokens}" for r in traffic(30).requests]
    (tmp_path / "log.csv").write_text("\n".join(["t,input,output", *rows]))
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    argv = ["whatif", str(tmp_path / "log.csv"), "--server-info", str(tmp_path / "info.json")]
    argv += ["--policies", "fcfs", "sage", "--seeds", "1", "--output", str(tmp_path / "out")]
    assert main([*argv, "--load", "2", "--max-new-tokens", "400"]) == 0
    printed = capsys.readouterr().out
    assert "Under sage, instead of lpm: mean TTLT" in printed
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row["policy"] for row in summary["rows"]] == ["lpm", "fcfs", "sage"]
    assert (tmp_path / "out" / "whatif.svg").read_text().startswith("<svg")
    assert main([*argv[:2], "--server-info", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_what_cannot_be_said_is_known_before_anything_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(*_: object, **__: object) -> None:
        pytest.fail("hours are lost")

    monkeypatch.setattr("bench.whatif.command.answer_of", simulated)
    (tmp_path / "log.csv").write_text("t,input,output\n0,5,5\n")
    argv = ["whatif", str(tmp_path / "log.csv"), "--preset", "h800-qwen3-32b"]
    for option in ("--policy", "--policies"):
        with pytest.raises(SystemExit, match="2"):
            main([*argv, option, "shortest-job-first"])
        err = capsys.readouterr().err
        assert "unknown policy 'shortest-job-first', allowed: fcfs" in err
        assert "sage" in err
    assert main([*argv, "--output", str(tmp_path / "log.csv" / "out")]) == 2
    assert "log.csv" in capsys.readouterr().err


def test_a_program_gets_json_and_a_picture_that_fails_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{r.arrival_s},{r.input_tokens},{r.output_tokens}" for r in traffic(30).requests]
    (tmp_path / "log.csv").write_text("\n".join(["t,input,output", *rows]))
    argv = ["whatif", str(tmp_path / "log.csv"), "--preset", "h800-qwen3-32b", "--seeds", "1"]
    argv += ["--policies", "fcfs", "sage", "--output", str(tmp_path / "out"), "--json"]

    def fails(*_: object) -> str:
        raise OSError("no room")

    monkeypatch.setattr("bench.experiment.plot.ratios_to_first", fails)
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert "no picture: no room" in printed.err
    found = json.loads(printed.out)
    assert [row["policy"] for row in found["rows"]] == ["fcfs", "sage"]
    assert len(found["without_caps"]) == 2
    assert any(note.startswith("CAUTION: the log does not say max_new") for note in found["notes"])


def test_where_the_log_says_no_caps_there_are_two_answers_the_less_flattering_first() -> None:
    """SGLang's own policies hold back room for caps, which ours do not go by."""
    said = traffic(60)
    log = replace(said, requests=tuple(replace(r, cap_tokens=None) for r in said.requests))
    answer = answer_of(log, SMALL, ["fcfs", "sage"], CONFIG, num_seeds=1)
    first, second = answer.tables
    assert "300, the longest answer" in first
    assert "none" in second
    assert answer.rows is answer.tables[first]
    ratios = [rows[1].mean_ratio.value for rows in answer.tables.values()]
    assert ratios[1] < ratios[0]
    assert any("CAUTION: the log does not say max_new_tokens of 60" in n for n in answer.notes)
    for told, cap in ((log, 400), (said, None)):
        one = answer_of(told, SMALL, ["fcfs", "sage"], CONFIG, num_seeds=1, cap_tokens=cap)
        assert list(one.tables) == [""]
        assert not [note for note in one.notes if "max_new_tokens of" in note]


def test_presets_are_engines_too() -> None:
    assert of_preset("h800-qwen3-32b").engine == PRESETS["h800-qwen3-32b"]
