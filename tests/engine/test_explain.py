"""A real server's trace says what became of its requests, and why."""

from __future__ import annotations

import json
import stat

import pytest

from sage_sched import cli
from tests.checks.exactness import crowd
from tests.engine.crowds import ask_together
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, wait_until


def test_a_trace_tells_what_became_of_requests(
    yielding: SageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = yielding.log.parent / "trace.jsonl"
    ask_together(yielding, crowd(12, seed=4))
    generate(yielding, SHORT_PROMPT, rid="the last")
    wait_until(lambda: '"ends","rid":"the last"' in trace.read_text())
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    assert SHORT_PROMPT not in trace.read_text()
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    came = [event for event in events if event["is"] == "came"]
    predicted = [event for event in came if event["source"] != "none"]
    assert all(0 < event["p50_tokens"] <= event["p80_tokens"] for event in predicted)
    assert len(predicted) >= 12
    ended = {event["rid"] for event in events if event["is"] == "ends"}
    assert {event["rid"] for event in came} == ended
    stats = yielding.stats()
    names = [event["is"] for event in events]
    assert names.count("preempt") == stats["preemption"]["num_preemptions"] > 0
    assert names.count("resume") == stats["preemption"]["num_resumed"]
    assert stats["trace"] == {"num_written": len(events), "num_lost": 0, "is_stopped": False}

    yielded = next(event for event in events if event["is"] == "preempt")
    assert cli.main(["explain", yielded["rid"], str(trace)]) == 0
    assert f"is preempted for {yielded['to']}" in capsys.readouterr().out
    assert cli.main(["explain", "--summary", str(trace)]) == 0
    assert f"preempted {names.count('preempt')} times" in capsys.readouterr().out
