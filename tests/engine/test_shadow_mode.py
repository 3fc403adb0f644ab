"""A stock server with --sage-shadow differs from one without only in its record."""

from __future__ import annotations

import json
import stat
from functools import partial
from pathlib import Path

import pytest

from bench.whatif.engine import of_running
from bench.whatif.read import read_log
from sage_sched.cli import main
from tests.checks.exactness import ask, differences
from tests.engine import stage
from tests.engine.conftest import ASKED, POLICY, Stock
from tests.engine.serving import SageServer, generate, post, wait_until

SECRET = "Never write this down"
PROMPTS = {
    "long": f"{SECRET}: " + "tell me of the dragon and the seven seas. " * 12,
    "short": f"{SECRET}.",
    "middle": f"{SECRET}: " + "what do they mean? " * 6,
    "same": f"{SECRET}!",
    "chatty": f"{SECRET}: " + "why? " * 10,
}


def test_the_shadow_records_and_changes_nothing(
    model: Path, stock: Stock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, dumps = tmp_path / "record.jsonl", tmp_path / "dumps"
    flags = ["--sage-shadow", str(record)]
    with SageServer(model, tmp_path, flags=flags, policy=POLICY) as server:
        dumping = {"dump_requests_folder": str(dumps), "dump_requests_threshold": len(PROMPTS)}
        post(server, "/configure_logging", dumping)
        own = [{"custom_params": {"sage_lengths": [1, 2], "own": i}} for i in range(len(PROMPTS))]
        calls = [
            partial(generate, server, text, 9 + i, rid=rid, sampling_params=own[i])
            for i, (rid, text) in enumerate(PROMPTS.items())
        ]

        def predicted(state: object) -> None:
            """No request waits for its prediction. These are held until all predictions are
            there."""
            wait_until(lambda: server.stats()["predictor"]["num_predicted_warm"] == len(PROMPTS))

        stage.together(server, calls, predicted)
        order = stage.state(server)["started"]
        assert order == ["short", "same", "chatty", "middle", "long"]
        assert server.stats()["gaps"]["stayed"]["num"] >= len(PROMPTS)
        wait_until(lambda: server.stats()["shadow"]["num_written"] == len(PROMPTS))
        # All were cut by their caps.
        wait_until(lambda: server.stats()["predictor"]["quality"].get("num_answers") == 0)
        generate(server, "Any more?", 4, n=2)
        post(server, "/generate", {"input_ids": [5, 6, 7]})
        num_different, largest = differences(stock, ask(server, ASKED, 12))
        assert (num_different, largest < 1e-3) == (0, True)
        wait_until(lambda: server.stats()["shadow"]["num_written"] > len(PROMPTS) + len(ASKED))
        assert of_running(server.url, None).policy == POLICY
        wait_until(lambda: any(dumps.rglob("*.pkl")))
        assert main(["set", "schedule_policy=sage", "--url", server.url]) == 2
        assert "under one of our policies?" in capsys.readouterr().err

    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    text = record.read_text()
    assert SECRET not in text
    rows = [json.loads(line) for line in text.splitlines()][: len(PROMPTS)]
    assert sorted(row["max_new_tokens"] for row in rows) == [9, 10, 11, 12, 13]
    log = read_log([record])
    assert len(log.requests) > len(PROMPTS) + len(ASKED)
    assert all(row["prediction"] for row in rows)
    assert not any(one.prompt for one in log.requests)
    assert "left out" not in " ".join(log.lines)
    # SGLang can still dump these requests, and its pickle has no object of ours.
    dumped = b"".join(file.read_bytes() for file in dumps.rglob("*.pkl"))
    assert b"patches" not in dumped
    assert all(prompt.encode() in dumped for prompt in PROMPTS.values())
    assert "sage-sched: _" not in (tmp_path / "server.log").read_text()
