from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from patches.ops.explain_command import last_run, of_request, summary, summary_lines, timeline
from sage_sched.cli import main

HERE = Path(__file__).parent
EVENTS = [json.loads(line) for line in (HERE / "trace.jsonl").read_text().splitlines()]
_, CAME, STARTS, _, _, YIELDS, *_, ENDS = EVENTS


def explained(
    events: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str
) -> list[str]:
    """Write a trace, with texts unchanged. Return the lines that the command prints."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (tmp_path / "trace").write_text("\n".join(lines))
    assert main(["explain", *argv, str(tmp_path / "trace")]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out.splitlines()


def test_requests_and_waits_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for expected in (HERE / "explained.txt").read_text().split("\n\n$ explain ")[1:]:
        arg, *lines = expected.rstrip().splitlines()
        assert explained(EVENTS, tmp_path, capsys, arg) == lines
    found = of_request(EVENTS, "long")
    assert json.loads("".join(explained(EVENTS, tmp_path, capsys, "--json", "long"))) == found
    assert of_request(EVENTS, "unknown")[-1] == {**ENDS, "t": 5.0}
    assert of_request(EVENTS, "another") == []


def test_the_progress_of_a_batch_is_explained() -> None:
    progress = {"batch": "b", "num_requests": 9, "num_ended": 4}
    for done_in_s, predicted_in_s, told in (
        (60.0, 50.0, "the last one is predicted to end in 50.0 s, and 60.0 s are left for it"),
        ("soon", 50.0, None),  # a damaged line
    ):
        batch = {**progress, "done_in_s": done_in_s, "predicted_in_s": predicted_in_s}
        lines = timeline([{**CAME, "batch": batch}, {**ENDS, "rid": CAME["rid"]}], CAME["rid"])
        said = told and f"; 4 of 9 requests of batch b have ended, {told}"
        assert lines[0].endswith(said or "wait")
        assert "batch" not in lines[1]


def test_a_trace_is_read_as_far_as_it_goes_and_the_last_run_counts() -> None:
    for number in range(len(EVENTS) + 1):
        summary_lines(summary(EVENTS[number:]))
        for rid in ("long", "short", "unknown"):
            timeline(EVENTS[number:], rid)
    assert last_run([*EVENTS, *EVENTS]) == EVENTS
    begun = EVENTS.index(YIELDS)  # for a request that came before this trace begins
    assert [event["is"] for event in of_request(EVENTS[begun:], "short")] == ["starts", "ends"]


DAMAGED: list[Any] = [
    *([{**event, "t": t}] for event in (CAME, STARTS) for t in ("x", None, math.nan, [1], True)),
    *([{name: value for name, value in event.items() if name != left_out}]
      for event in (CAME, STARTS, ENDS, YIELDS) for left_out in event),
    [{**CAME, "rid": rid} for rid in (5, ["a"], {}, None)],
    [{**CAME, "rid": "b", "arrival": 10**400}], [{"t": 0, "is": ["came"], "rid": "a"}],
    [{"t": 2, "is": "preempt", "to": "a", "reason": "x", "way": "y"}],
    "[" * 100_000, '{"t": ' + "9" * 5000 + "}", "\x00\x00", "5", "",
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_left_out(
    damaged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [damaged] if isinstance(damaged, str) else damaged
    assert explained([CAME, *events, STARTS], tmp_path, capsys, "--summary")
    assert explained([CAME, *events, STARTS], tmp_path, capsys, "long")


def test_ids_cannot_act_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control, trace = "a\x1b]0;owned\x07\n    9.000 s  ends", str(tmp_path / "trace")
    events = [
        {**CAME, "rid": control}, {**CAME, "rid": "b"}, {**STARTS, "rid": control},
        {**YIELDS, "rid": control, "to": "b"}, {**ENDS, "rid": "\ud800"},
    ]  # fmt: skip
    for argv in ("--summary", control, "b"):
        lines = explained(events, tmp_path, capsys, argv)
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("    9.000 s  ends") for line in lines)
    for wrong in ([f"{control}?", trace], [trace], ["a", str(tmp_path / "nowhere")]):
        assert main(["explain", *wrong]) == 2
        assert capsys.readouterr().err[:-1].isprintable()
