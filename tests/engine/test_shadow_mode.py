"""A stock server with --sage-shadow against one without: the record is all that differs."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from bench.engines.server.server import Server
from bench.whatif.engine import of_running
from bench.whatif.read import read_log
from sage_sched.cli import main
from tests.engine.conftest import Stock
from tests.engine.kinds import CHECKED, PATIENT
from tests.engine.serving import CPU_FLAGS, generate, post, states, wait_until, warmed_store
from tests.engine.shadowing import POLICY, PROMPTS, SECRET, serve


def test_the_shadow_records_and_changes_nothing(
    model: Path, stock: Stock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, config, dumps = tmp_path / "record.jsonl", tmp_path / "sage.toml", tmp_path / "dumps"
    config.write_text(f'{PATIENT}[store]\npath = "{warmed_store(tmp_path / "store")}"\n')
    flags = [*CPU_FLAGS, *POLICY, "--sage-shadow", str(record), "--sage-config", str(config)]
    with Server(model, flags, log=tmp_path / "server.log", env=CHECKED) as server:

        def counted() -> dict[str, Any]:
            found: dict[str, Any] = states(server)[0]["sage"]
            return found

        dumping = {"dump_requests_folder": str(dumps), "dump_requests_threshold": len(PROMPTS)}
        post(server, "/configure_logging", dumping)
        shadowed = serve(server)
        assert shadowed.order == ["short", "same", "chatty", "middle", "long"]
        assert shadowed == stock.unshadowed
        assert counted()["gaps"]["stayed"]["num"] >= len(PROMPTS)
        assert counted()["predictor"]["num_predicted_warm"] == len(PROMPTS)
        wait_until(lambda: counted()["shadow"]["num_written"] == len(PROMPTS))
        # All were cut by their caps.
        wait_until(lambda: counted()["predictor"]["quality"].get("num_answers") == 0)
        generate(server, "Any more?", 4, n=2)
        post(server, "/generate", {"input_ids": [5, 6, 7]})
        wait_until(lambda: counted()["shadow"]["num_written"] > len(PROMPTS))
        assert of_running(server.url, None).policy == "shortest-prefill-first"
        wait_until(lambda: any(dumps.rglob("*.pkl")))
        assert main(["set", "schedule_policy=sage", "--url", server.url]) == 2
        assert "under one of our policies?" in capsys.readouterr().err

    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    text = record.read_text()
    assert SECRET not in text
    rows = [json.loads(line) for line in text.splitlines()][: len(PROMPTS)]
    assert sorted(row["max_new_tokens"] for row in rows) == [9, 10, 11, 12, 13]
    log = read_log([record])
    assert len(log.requests) > len(PROMPTS)
    assert all(one.forecast is not None and not one.prompt for one in log.requests)
    assert "left out" not in " ".join(log.lines)
    # SGLang can dump these requests all the same, and no object of ours is in its pickle.
    (dumped,) = dumps.rglob("*.pkl")
    assert b"patches" not in dumped.read_bytes()
    assert all(prompt.encode() in dumped.read_bytes() for prompt in PROMPTS.values())
    assert "sage-sched: _" not in (tmp_path / "server.log").read_text()
