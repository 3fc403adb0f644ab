"""The comparison itself, small, on real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.experiment import records
from predictor_store.config_file import read_config
from sage_sched.app.config import StepTimeConfig
from sage_sched.cli import main


@pytest.mark.server
def test_a_small_comparison_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = "fcfs@conservativeness=0.3,clip=512"
    arguments = ["--arms", tuned, "sage", "--seeds", "1", "--output", str(tmp_path)]
    keys = ["rates=[20]", "num_requests=12", "max_new_tokens=64", "arrivals=batch"]
    assert main(["bench", "run", "compare", *arguments, "--set", *keys]) == 0

    file = tmp_path / "records" / "compare.jsonl"
    runs = records.read(file)
    assert [run.policy for run in runs] == [tuned, "sage"]
    for run in runs:
        assert (run.problem, run.metrics["offered_rate"]) == ("", 20)
        assert len(run.about["requests"]["output_tokens"]) == 12
        assert max(run.about["requests"]["output_tokens"]) < 64
        assert run.about["settings"]["sglang"]
    fcfs, sage = (run.about["requests"] for run in runs)
    assert all(fcfs[same] == sage[same] for same in ("class", "input_tokens", "output_tokens"))
    # Our policy has ranked every request of the run. The stock server has no such counter.
    assert runs[0].about["counters"] == {}
    assert sum(runs[1].about["counters"]["num_predicted"].values()) >= 12
    log = next((tmp_path / "compare" / "logs").glob(f"{tuned}*seed-0.log")).read_text()
    assert "'schedule_conservativeness': 0.3" in log
    assert "mean TTLT, ratio" in capsys.readouterr().out


@pytest.mark.server
def test_step_times_are_fitted_to_a_real_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bench.engines.server.fit.PHASES", ((1, 160), (4, 128), (16, 128), (32, 96))
    )
    assert main(["bench", "fit", "--output", str(tmp_path)]) == 0
    config = read_config(str(tmp_path / "step_time.yaml"))
    assert config.step_time is not None
    assert config.step_time.decode_base_ms + config.step_time.decode_request_ms > 0
    assert config.step_time != StepTimeConfig()
    assert "half of the steps" in capsys.readouterr().out
