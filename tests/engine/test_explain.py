"""Answers of a real server explain their predictions, and its trace explains its requests."""

from __future__ import annotations

import json
import stat
from functools import partial
from typing import Any

import pytest
import requests

from sage_sched import cli
from tests.checks.exactness import crowd
from tests.engine import stage
from tests.engine.crowds import ask_together
from tests.engine.serving import LONG_PROMPT, SHORT_PROMPT, SageServer, generate, wait_until

EXPLAIN = {"custom_params": {"explain": True}}


@pytest.fixture
def server(yielding: SageServer) -> SageServer:
    # The first tests of this server: no answer to these prompts has been learned.
    return yielding


def test_whoever_asks_is_told_and_nobody_else(server: SageServer) -> None:
    told = generate(server, LONG_PROMPT, 300, sampling_params=EXPLAIN)["meta_info"]["sage"]
    assert told["source"] == "warm"
    assert 200 < told["p50_tokens"] <= told["p80_tokens"] <= 300
    assert (told["num_preemptions"], told["place_at_arrival"]) == (0, 0)
    assert told["wait_ms"] > 0
    assert "sage" not in generate(server, LONG_PROMPT)["meta_info"]
    for refused in ({"explain": 1}, {"explain": "true"}, {"__sage_explain": True}):
        body = {"custom_params": refused}
        assert "sage" not in generate(server, LONG_PROMPT, sampling_params=body)["meta_info"]


def test_each_of_a_batch_is_told_of_itself(server: SageServer) -> None:
    answers = requests.post(
        f"{server.url}/generate",
        json={
            "text": [LONG_PROMPT, SHORT_PROMPT, LONG_PROMPT],
            "sampling_params": [
                {"max_new_tokens": 40, **EXPLAIN},
                {"max_new_tokens": 40, **EXPLAIN},
                {"max_new_tokens": 40},
            ],
        },
        timeout=300,
    ).json()
    told = [answer["meta_info"].get("sage") for answer in answers]
    assert told[2] is None
    assert told[0]["p50_tokens"] > told[1]["p50_tokens"]


def test_a_stream_is_told_by_the_header(server: SageServer) -> None:
    answer = requests.post(
        f"{server.url}/generate",
        json={"text": SHORT_PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True},
        headers={"X-Sage-Explain": "1"},
        timeout=300,
    )
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    assert json.loads(chunks[-1])["meta_info"]["sage"]["source"] == "warm"


def test_who_yields_is_told_so_and_its_answer_stays_the_same(server: SageServer) -> None:
    asked = crowd(12, seed=3)

    def say(one: tuple[str, int], **more: Any) -> Any:
        sampling = {"ignore_eos": True, **more}
        return generate(server, one[0], one[1], sampling_params=sampling)

    told = stage.together(server, [partial(say, one, **EXPLAIN) for one in asked])
    facts = [answer["meta_info"]["sage"] for answer in told]
    assert sum(each["num_preemptions"] for each in facts) > 0
    for each, answer in zip(facts, told, strict=True):
        assert each["num_preemptions"] == answer["meta_info"]["num_retractions"]
    # All were there before the first started, in an order that has them all.
    assert sorted(each["place_at_arrival"] for each in facts) == list(range(len(asked)))
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
    stats = server.stats()
    assert names.count("preempt") == stats["preemption"]["num_preemptions"] >= num_preemptions
    assert names.count("resume") == stats["preemption"]["num_resumed"]
    assert {event["rid"] for event in events if event["is"] == "came"} == {
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
