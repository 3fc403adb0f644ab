"""A log under several policies, and the certainty of the results."""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.experiment.stats import Ratio
from bench.simulator.host import NO_HOST
from bench.simulator.presets import PRESETS, USUAL_HOST, Engine
from bench.whatif.answer import Answer, answer_of
from bench.whatif.comparison import endings, good_table, sentence, table
from bench.whatif.engine import OwnServer, of_info
from bench.whatif.log import Logged, TrafficLog
from bench.whatif.plot import ratios_to_first
from bench.whatif.predictions import predictions_of
from bench.whatif.replayed_predictor import ReplayedPredictor
from bench.whatif.simulation import Slo
from bench.workloads.prompts import WorkloadError
from predictor_store.data.warm import Observation, warm_store
from sage_sched.app.config import SageConfig, StepTimeConfig
from sage_sched.cli import main
from sage_sched.distribution import LengthDistribution
from tests.bench.workloads.fingerprint import fingerprint

CONFIG = SageConfig()
SMALL = OwnServer(
    replace(PRESETS["h800-qwen3-32b"], kv_pool_tokens=4096, max_running_requests=8, host=NO_HOST),
    "",
    "small",
)


def traffic(num_requests: int = 120, **more: Any) -> TrafficLog:
    """Return more requests than the small engine serves, with short and long answers mixed."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.4, num_requests)).tolist()
    lengths = np.where(rng.random(num_requests) < 0.7, 20, 300).tolist()
    rows = zip(arrivals, lengths, strict=True)
    return TrafficLog(tuple(Logged(at, 50, n, **{"cap_tokens": 400, **more}) for at, n in rows))


def asked(log: TrafficLog, *policies: str, server: OwnServer = SMALL, **more: Any) -> Answer:
    return answer_of(log, server, policies, CONFIG, **{"num_seeds": 1, **more})


def test_the_interval_covers_better_and_worse_predictions() -> None:
    answer = asked(traffic(), "fcfs", "sage", num_seeds=2)
    fcfs, sage = answer.rows
    ratio, said = sage.mean_ratio, sentence(answer.rows, "sage")
    assert f"{round(100 * (1 - ratio.high))} % to {round(100 * (1 - ratio.low))} %" in said
    shown = [*map(astuple, answer.rows)], table(answer.rows), ratios_to_first(answer.rows, "title")
    assert [*map(fingerprint, shown)] == ["4cbd3ac7", "92dc0d77", "5634280e"]
    others = [replace(fcfs, policy=f"at {r}", mean_ratio=Ratio(r, r, r)) for r in (0.7, 0.6, 0.8)]
    best = " The best of the others is `at 0.6`, in 11 s."
    assert sentence([fcfs, sage, *others], "sage") == said + best
    assert sentence([sage], "sage") == "`sage`, as now, finishes answers in 10 s on average."
    assert sentence([fcfs], "sage") == ""
    known = replace(SMALL, crps_gain=0.4)
    surer = asked(traffic(), "fcfs", "sage", num_seeds=2, server=known).rows[1].mean_ratio
    assert surer.high - surer.low < ratio.high - ratio.low


def test_a_policy_that_runs_out_of_memory_has_a_line() -> None:
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / 8, 150)).tolist()
    inputs = np.where(rng.random(150) < 0.1, 8000, 250).tolist()
    rows = zip(arrivals, inputs, strict=True)
    log = TrafficLog(tuple(Logged(at, n, 100, 1024) for at, n in rows))
    engine = replace(
        SMALL.engine, kv_pool_tokens=12_000, chunked_prefill_size=1024, max_running_requests=256
    )
    server, ends = replace(SMALL, engine=engine), "shortest-prefill-first@clip=16"
    answer = asked(log, ends, "fcfs", "sage", server=server)
    (found,) = answer.tables.values()
    assert [row.policy for row in found.rows] == ["fcfs", "sage"]
    assert 0 < found.ended_s[ends] < answer.rows[0].mean_ttlt_s + arrivals[-1]
    assert answer.good[ends] == [0.0]
    said = endings({"a": 3.4}, "sage").splitlines()
    assert said == [endings({"a": 3.4}, "a"), "sage serves this log to its end."]
    assert said[0] == "a: SGLang's scheduler ends here after 3 s, out of KV memory"
    with pytest.raises(WorkloadError, match="each of these policies"):
        asked(log, ends, server=server)


def test_good_requests_get_fewer_the_faster_they_come() -> None:
    slo = Slo(ttft_ms=2000.0)
    good = asked(traffic(), "fcfs", "sage", multiples=(0.1, 1.0, 4.0), slo=slo).good
    assert {name: [round(120 * share) for share in of] for name, of in good.items()} == {
        "fcfs": [120, 44, 22], "sage": [120, 98, 44],
    }  # fmt: skip
    shown = good_table({"fcfs": [1.0, 0.9], "sage": [1.0, 1.0], "hrrn": [0.5, 0.4]}, (1, 2))
    said = [line.split("  ")[-1].strip() for line in shown.splitlines()[2:]]
    assert said == ["1.50x", "2.00x or more", "less than 1x"]


def test_a_prompt_is_predicted_by_answers_that_had_ended(tmp_path: Path) -> None:
    requests = [
        Logged(float(i), 9, 700 if i < 40 else 3, None, i % 9 == 8, f"Name a colour, please: {i}")
        for i in range(80)
    ]

    def means(ends_s: list[float]) -> list[float]:
        predictor = ReplayedPredictor(CONFIG, None)
        found = predictor.predictions(requests, ends_s)
        # Cut answers are not judged.
        assert predictor.quality().get("num_answers", 0) == (71 if ends_s[0] < 80 else 0)
        return [each.mean() if each else 0.0 for each in found]

    unlearned, learned = means([1e9] * 80), means([i + 0.5 for i in range(80)])
    assert 0 < max(unlearned) < 1.5 * min(unlearned)
    assert learned[39] > 400
    assert 0 < learned[79] < learned[39] / 2
    still_run = [replace(each, ttlt_s=70.0) for each in requests]
    found = predictions_of(still_run, SMALL.engine, CONFIG, store=None, gain=None, num_seeds=1)
    assert [each and round(each.mean()) for each in found.variants[0][60::19]] == [116, 761]
    warm_store(tmp_path, [Observation(r.prompt, 700) for r in requests], CONFIG.store, "static")
    warmed = ReplayedPredictor(CONFIG, tmp_path).predictions(requests[:1], [1e9])[0]
    assert warmed is not None
    assert warmed.mean() > 400


def test_each_request_gets_its_best_prediction() -> None:
    said = LengthDistribution.from_samples([7], "history")
    recorded = Logged(0.0, 9, 20, 400, forecast=said, prompt="Why?")
    by_prompt, unknown = Logged(1.0, 9, 30, 400, prompt="How?"), Logged(2.0, 9, 40, 400)
    some, few = [recorded, by_prompt, unknown], [*[recorded] * 40, unknown]
    for requests, num_variants in ((some, 6), (few, 1), ([recorded, by_prompt], 1)):
        found = predictions_of(requests, SMALL.engine, CONFIG, store=None, gain=None, num_seeds=2)
        assert len(found.variants) == num_variants
        assert all(variant[0] is said for variant in found.variants)


def test_notes_name_left_out_requests_and_a_far_off_simulation() -> None:
    log = traffic()
    too_long = Logged(log.last_arrival_s, 4000, 200, 400)
    answer = asked(replace(log, requests=(*log.requests, too_long)), "fcfs")
    assert any("1 requests that are too long" in note for note in answer.notes)
    with pytest.raises(WorkloadError, match="4096 tokens"):
        asked(replace(log, requests=(too_long,)), "fcfs")
    for factor in (1, 3):
        told = traffic(ttlt_s=factor * answer.rows[0].mean_ttlt_s)
        assert ("far off" in "\n".join(asked(told, "fcfs").notes)) == (factor == 3)
    # A simulation of another load is not compared with the log.
    (first, *_, last) = told.requests
    log = TrafficLog((first, replace(first, arrival_s=1.0), replace(last, arrival_s=8.0)))
    assert asked(log, "fcfs", load=2.0).notes == [
        "log: 3 requests of 4 s, 0.75 requests/s",
        "engine: small, KV of 4096 tokens, 8 slots",
        "predictions: none is needed",
        "CAUTION: the log spans only 4.7 mean TTLTs. Requests before and after it would change the "
        "figures",
    ]
    part = replace(log, requests=(*log.requests, replace(last, arrival_s=9.0, ttlt_s=None)))
    assert (log.mean_ttlt_s(), part.mean_ttlt_s()) == (first.ttlt_s, None)


def test_without_caps_there_are_two_answers() -> None:
    """SGLang's own policies reserve memory for caps; ours do not."""
    log = traffic(60, cap_tokens=None)
    answer = asked(log, "fcfs", "sage")
    assert answer.rows is next(iter(answer.tables.values())).rows
    as_longest, without = (found.rows[1].mean_ratio.value for found in answer.tables.values())
    assert without < as_longest
    for told, cap in ((log, 400), (traffic(60), None)):
        assert list(asked(told, "fcfs", "sage", cap_tokens=cap).tables) == [""]


def info(sage: dict[str, Any] | None, **changed: Any) -> dict[str, Any]:
    """Return /server_info, with the state of sage and changes."""
    state = {"effective_max_running_requests_per_dp": 32, "memory_usage": {"kvcache": 1.25}}
    return {
        "max_total_num_tokens": 5003, "page_size": 16, "chunked_prefill_size": 2050,
        "max_prefill_tokens": 16384, "schedule_policy": "lpm", "schedule_conservativeness": 0.3,
        "enable_mixed_chunk": True, "dp_size": 1, "internal_states": [state | {"sage": sage}],
        **changed,
    }  # fmt: skip


STATE = {
    "step_time": {**asdict(StepTimeConfig()), "source": "learned", "num_steps": 9},
    "preemption": {"swap_token_us": 3.0, "host_pool_tokens": 7000},
    "predictor": {"quality": {"num_answers": 400, "crps_gain": 0.31}},
}
FOUND = Engine(
    StepTimeConfig().step_time(), kv_pool_tokens=4992, max_running_requests=32, page_size=16,
    chunked_prefill_size=2048, max_prefill_tokens=16384, schedule_conservativeness=0.3,
    mixed_chunk=True, swap_token_s=3e-6, host_pool_tokens=7000, host=USUAL_HOST,
)  # fmt: skip


def test_an_engine_is_read_from_server_info() -> None:
    server = of_info(info(STATE), None, "info")
    assert (server.engine, server.policy, server.crps_gain) == (FOUND, "lpm", 0.31)
    assert of_info(info(STATE, schedule_policy="random"), None, "info").policy == ""
    few = {"predictor": {"quality": {"num_answers": 99, "crps_gain": 0.31}}}
    assert of_info(info(STATE | few), None, "info").crps_gain is None
    # 150 moves of 100 tokens took 0.6 s, 0.045 s of it for their bytes.
    moves = {"num_preemptions": 90, "num_left_in_tree": 10, "num_resumed": 70, "host_pool_gib": 7.0,
             "host_pool_tokens": 7000, "swapped_bytes": 15 * 2**30, "swapped_s": 0.6}  # fmt: skip
    busy = {"num_passes": 200, "mean_pass_ms": 0.7, "preemption": STATE["preemption"] | moves}
    host = of_info(info(STATE | busy), None, "info").engine.host
    assert (host.plan_s, host.move_s) == pytest.approx((0.7e-3, 0.555 / 150))
    assert replace(host, plan_s=USUAL_HOST.plan_s, move_s=USUAL_HOST.move_s) == USUAL_HOST
    whole = of_info(info(STATE, chunked_prefill_size=-1), None, "info").engine
    assert whole.chunked_prefill_size == 4992
    # Without measured moves, their time follows from the bytes of the KV over PCIe.
    given = PRESETS["h100-llama-3.1-8b"].step_time
    stock = of_info(info(None), given, "info").engine
    assert (stock.step_time, stock.swap_token_s) == (given, 1.25e9 / 5003 / 25e9)
    for told in (info(None), info(STATE, dp_size=2), info(STATE, max_prefill_tokens=None), {}):
        with pytest.raises(WorkloadError):
            of_info(told, None, "info")


OPTIONS = {
    "load": 2.0, "cap_tokens": 9, "store": Path("kept"), "num_seeds": 5, "multiples": [1.0, 2.0],
    "slo": Slo(300.0, 40.0),
}  # fmt: skip


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, saved, output = tmp_path / "log.csv", tmp_path / "info.json", tmp_path / "out"
    rows = [f"{r.arrival_s},{r.input_tokens},{r.output_tokens}" for r in traffic(30).requests]
    log.write_text("\n".join(["t,input,output", *rows]))
    saved.write_text(json.dumps(info(STATE)))
    command = ["whatif", str(log), "--server-info", str(saved), "--policies", "fcfs", "sage"]
    more = ["--seeds", "1", "--load", "2", "--max-new-tokens", "400"]
    assert main([*command, *more, "--output", str(output)]) == 0
    said = capsys.readouterr()
    assert "`sage` finished answers in" in said.out
    assert "simulating 30 requests 15 times" in said.err
    summary = json.loads((output / "summary.json").read_text())
    assert [row["policy"] for row in summary["rows"]] == ["lpm", "fcfs", "sage"]
    assert (summary["without_caps"], summary["multiples"]) == (None, [1.0, 1.25, 1.5, 2.0, 3.0])
    assert summary["notes"][0] == "log: 30 requests of 7.447 s, 4.03 requests/s"
    assert (output / "whatif.svg").read_text().startswith("<svg")
    assert fingerprint([*summary["rows"][2].values(), *summary["good_share"].items()]) == "5c24fb02"

    def asked(*given: Any, **options: Any) -> Answer:
        assert (given[1].policy, given[2], options) == ("", ["lpm", "sage"], OPTIONS)
        step_time = StepTimeConfig(decode_base_ms=7.0).step_time()
        assert given[1].engine == replace(PRESETS["h800-qwen3-32b"], step_time=step_time)
        raise WorkloadError("asked")

    # Errors are found before the simulation, which would take hours.
    monkeypatch.setattr("bench.whatif.command.answer_of", asked)
    (tmp_path / "times.toml").write_text("[step_time]\ndecode_base_ms = 7")
    options = (
        f"{log} --preset h800-qwen3-32b --step-time {tmp_path}/times.toml --policy lpm --policies "
        "sage --load 2 --max-new-tokens 9 --store kept --seeds 5 --multiples 2 1 2 --ttft-ms 300 "
        f"--tpot-ms 40 --output {output}"
    )
    assert main(["whatif", *options.split()]) == 2
    assert "whatif: asked" in capsys.readouterr().err
    for wrong in (["--output", f"{log}/out"], ["--server-info", f"{log}.none"]):
        assert main([*command, *wrong]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--policies", "shortest-job-first"])
