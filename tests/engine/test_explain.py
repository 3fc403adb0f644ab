"""A real server's trace says what became of its requests, and why."""

from __future__ import annotations

import json
import stat
from functools import partial
from typing import Any

import pytest

from sage_sched import cli
from tests.checks.exactness import crowd
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.serving import (
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
)


@pytest.fixture
def server(yielding: SageServer) -> SageServer:
    return yielding


def test_an_answer_stays_the_same_if_its_request_yields(server: SageServer) -> None:
    asked = crowd(12, seed=3)

    def say(one: tuple[str, int]) -> Any:
        return generate(server, one[0], one[1], sampling_params={"ignore_eos": True})

    told = stage.together(server, [partial(say, one) for one in asked])
    assert sum(answer["meta_info"]["num_retractions"] for answer in told) > 0
    assert [answer["text"] for answer in told] == [say(one)["text"] for one in asked]


def test_a_trace_is_summarized(server: SageServer, capsys: pytest.CaptureFixture[str]) -> None:
    trace = server.log.parent / "trace.jsonl"
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    before = server.stats()["preemption"]["num_preemptions"]
    ask_together(server, crowd(12, seed=4))
    assert (num_preemptions := server.stats()["preemption"]["num_preemptions"] - before) > 0
    generate(server, SHORT_PROMPT, rid="the last")
    wait_until(lambda: '"ends","rid":"the last"' in trace.read_text())
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    names = [event["is"] for event in events]
    came = [event for event in events if event["is"] == "came"]
    predicted = [event for event in came if event["source"] != "none"]
    assert all(0 < event["p50_tokens"] <= event["p80_tokens"] for event in predicted)
    assert len(predicted) >= 12
    stats = server.stats()
    assert names.count("preempt") == stats["preemption"]["num_preemptions"] >= num_preemptions
    assert names.count("resume") == stats["preemption"]["num_resumed"]
    assert {event["rid"] for event in came} == {
        event["rid"] for event in events if event["is"] == "ends"
    }
    assert stats["trace"] == {"num_written": len(events), "num_lost": 0, "is_stopped": False}
    assert SHORT_PROMPT not in trace.read_text()
    yielded = next(event for event in events if event["is"] == "preempt")
    assert cli.main(["explain", yielded["rid"], str(trace)]) == 0
    said = capsys.readouterr().out
    for what in (
        "comes with",
        "starts, having waited",
        f"is preempted for {yielded['to']}",
        "ends with",
    ):
        assert what in said
    assert cli.main(["explain", "--summary", str(trace)]) == 0
    assert (
        f"were preempted {stats['preemption']['num_preemptions']} times" in capsys.readouterr().out
    )
