"""A stock server with --sage-shadow against one without: the record is all that differs."""

from __future__ import annotations

import argparse
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.engines.server.server import Server
from bench.whatif.engine import of_running
from bench.whatif.read import read_log
from patches.ops import set_command
from sage_sched.errors import UserError
from tests.engine.conftest import Stock
from tests.engine.kinds import CHECKED, PATIENT
from tests.engine.serving import CPU_FLAGS, generate, wait_until, warmed_store
from tests.engine.shadowing import POLICY, PROMPTS, SECRET, serve


def test_the_shadow_records_and_changes_nothing(model: Path, stock: Stock, tmp_path: Path) -> None:
    record, config, dumps = tmp_path / "record.jsonl", tmp_path / "sage.toml", tmp_path / "dumps"
    config.write_text(f'{PATIENT}[store]\npath = "{warmed_store(tmp_path / "store")}"\n')
    flags = [*CPU_FLAGS, *POLICY, "--sage-shadow", str(record), "--sage-config", str(config)]
    with Server(model, flags, log=tmp_path / "server.log", env=CHECKED) as server:
        shadowed = serve(server, dumps)
        assert shadowed.order == ["short", "same", "chatty", "middle", "long"]
        assert shadowed.order == stock.unshadowed.order
        assert shadowed.answers == stock.unshadowed.answers
        assert "sage" not in stock.unshadowed.state

        assert shadowed.state["sage"]["gaps"]["stayed"]["num"] >= len(PROMPTS)
        predictor = shadowed.state["sage"]["predictor"]
        assert predictor["num_predicted_warm"] == len(PROMPTS)
        wait_until(lambda: _state(server)["sage"]["shadow"]["num_written"] == len(PROMPTS))
        wait_until(lambda: _scored(server) == 0)  # all were cut by their caps
        generate(server, "Any more?", 4, n=2)
        requests.post(f"{server.url}/generate", json={"input_ids": [5, 6, 7]}).raise_for_status()
        wait_until(lambda: _state(server)["sage"]["shadow"]["num_written"] > len(PROMPTS))
        assert of_running(server.url, None).policy == "shortest-prefill-first"
        wait_until(lambda: any(dumps.rglob("*.pkl")))
        for asked in (["schedule_policy=sage"], []):
            with pytest.raises(UserError, match=r"under one of our policies\?"):
                set_command.run(set_arguments([*asked, "--url", server.url]))

    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    text = record.read_text()
    assert SECRET not in text
    rows = [json.loads(line) for line in text.splitlines()][: len(PROMPTS)]
    assert sorted(row["max_new_tokens"] for row in rows) == [9, 10, 11, 12, 13]
    log = read_log([record])
    assert len(log.requests) > len(PROMPTS)
    assert all(one.forecast is not None for one in log.requests)
    assert not any(one.prompt for one in log.requests)
    assert "left out" not in " ".join(log.lines)
    # SGLang can dump these requests all the same, and no object of ours is in its pickle.
    (dumped,) = dumps.rglob("*.pkl")
    assert b"patches" not in dumped.read_bytes()
    assert all(prompt.encode() in dumped.read_bytes() for prompt in PROMPTS.values())
    assert "sage-sched: _" not in (tmp_path / "server.log").read_text()


def set_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    set_command.configure(parser)
    return parser.parse_args(words)


def _state(server: Server) -> dict[str, Any]:
    info = requests.get(f"{server.url}/server_info", timeout=300).json()
    state: dict[str, Any] = info["internal_states"][0]
    return state


def _scored(server: Server) -> int:
    return int(_state(server)["sage"]["predictor"]["quality"].get("num_answers", -1))
