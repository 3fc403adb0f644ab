"""Timelines and summaries of a trace."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from patches.ops.explain_command import last_run, of_request, summary, summary_lines, timeline
from sage_sched.cli import main


def came(t: float, rid: str, arrival: int, p50_tokens: int | None) -> dict[str, Any]:
    about = {"p50_tokens": p50_tokens, "p80_tokens": p50_tokens, "source": "history"}
    numbers = {"input_tokens": 7, "num_waiting": 0, "num_running": 0}
    return {"t": t, "is": "came", "rid": rid, "arrival": arrival, **about, **numbers}


def starts(t: float, rid: str, waited_s: float, tokens: int = 0) -> dict[str, Any]:
    about = {"waited_s": waited_s, "place": 0, "tokens": tokens}
    return {"t": t, "is": "starts", "rid": rid, **about}


def ends(t: float, rid: str) -> dict[str, Any]:
    return {"t": t, "is": "ends", "rid": rid, "tokens": 9, "why": "done"}


WORTH_IT = "its place is later, by more than the move costs"
YIELDS = {
    "is": "preempt",
    "rid": "long",
    "to": "short",
    "way": "to host memory",
    "reason": WORTH_IT,
}
RESUMES = {"is": "resume", "rid": "long", "reason": "there is room for it", "goes_first": True}
EVENTS: list[dict[str, Any]] = [
    {"t": 0.0, "is": "policy", "name": "sage", "at": 1.0},
    came(1.0, "long", 0, 900),
    starts(1.5, "long", 0.5),
    came(2.0, "short", 1, 10),
    came(2.0, "unknown", 2, None),
    {"t": 3.0, **YIELDS},
    starts(3.0, "short", 1.0),
    ends(4.0, "short"),
    {"t": 4.0, **RESUMES},
    ends(6.0, "long"),
    starts(6.0, "unknown", 4.0),
    ends(7.0, "unknown"),
]


def test_a_timeline_says_what_happened_when_and_why() -> None:
    assert timeline(EVENTS, "long") == [
        "    0.000 s  comes with 7 tokens; its answer is predicted to have 900 tokens, with 80 % "
        "at most 900 (history); 0 run and 0 wait",
        "    0.500 s  starts, having waited 0.500 s, with 0 before it at first",
        f"    2.000 s  is preempted for short: {WORTH_IT}; to host memory",
        "    3.000 s  comes back: there is room for it, as no other may overtake it any more",
        "    5.000 s  ends with 9 tokens (done)",
    ]
    assert "    1.000 s  long is preempted for it" in timeline(EVENTS, "short")
    assert "nothing is known of its answer" in timeline(EVENTS, "unknown")[0]
    assert timeline(EVENTS, "nobody") == []
    assert [(event["t"], event["is"]) for event in of_request(EVENTS, "short")] == [
        (0.0, "came"), (1.0, "preempt"), (1.0, "starts"), (2.0, "ends"),
    ]  # fmt: skip


def test_a_summary_says_who_waited_for_whom_and_why() -> None:
    found = summary(EVENTS)
    assert found["longest"][0]["for"][0] == {
        "rid": "long", "seconds": 3.0, "why": "for one that had come before",
    }  # fmt: skip
    lines = summary_lines(found)
    # long: 0.5 s for nobody, 1 s for short; short: 1 s for long; unknown: 4 s for both.
    assert lines[:4] == [
        "3 requests waited 6.500 s in all and were preempted 1 times",
        "  76.9%  for one that had come before",
        "  15.4%  for one that had come later and was predicted to be shorter",
        "   7.7%  no request ran",
    ]
    assert f"      1  preempt: {WORTH_IT}" in lines
    longest = lines[lines.index("the longest waits, and for whom:") + 1 :]
    assert longest[0] == "    4.000 s  unknown"
    assert longest[1] == "      3.000 s  long: for one that had come before"
    assert longest[2] == "      1.000 s  short: for one that had come before"


def test_a_trace_whose_beginning_is_lost_is_read_as_far_as_it_goes() -> None:
    for number in range(len(EVENTS) + 1):
        summary_lines(summary(EVENTS[number:]))
        for rid in ("long", "short", "unknown"):
            timeline(EVENTS[number:], rid)


def test_of_a_file_that_was_written_to_twice_the_last_run_counts() -> None:
    assert last_run([*EVENTS, *EVENTS]) == EVENTS


CONTROL = "a\x1b]0;owned\x07\n    9.000 s  ends"
SOUND = [came(0.0, "a", 0, 3), starts(1.0, "a", 1.0)]
DAMAGED: list[object] = [
    *([{**event, "t": t}] for event in SOUND for t in ("x", None, math.nan, [1], True)),
    *([{name: value for name, value in event.items() if name != left_out}]
      for event in (*SOUND, ends(2.0, "a"), {"t": 2.0, **YIELDS}) for left_out in event),
    [came(0.0, rid, 0, 3) for rid in (5, ["a"], {}, None)],
    [{**came(0.0, "b", 0, 3), "arrival": 10**400}], [{"t": 0, "is": ["came"], "rid": "a"}],
    [{"t": 2, "is": "preempt", "to": "a", "reason": "x", "way": "y"}],
    "[" * 100_000, '{"t": ' + "9" * 5000 + "}", "\x00\x00", "5", "",
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_left_out(
    damaged: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = damaged if isinstance(damaged, list) else []
    lines = [json.dumps(event) for event in (*events, *SOUND)]
    lines += [damaged] if isinstance(damaged, str) else []
    (tmp_path / "trace").write_text("\n".join(lines))
    for argv in (["a"], ["--summary"]):
        assert main(["explain", *argv, str(tmp_path / "trace")]) == 0
        assert capsys.readouterr().err == ""


def test_ids_cannot_act_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yields = {"t": 2.0, "is": "preempt", "rid": CONTROL, "to": "b", "reason": "x", "way": "y"}
    events = [came(0.0, CONTROL, 0, 9), came(0.0, "b", 1, 3), starts(1.0, CONTROL, 1.0), yields]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, [*events, ends(3.0, "\ud800")])))
    for argv in (["--summary"], [CONTROL], ["b"]):
        assert main(["explain", *argv, str(tmp_path / "trace")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("    9.000 s  ends") for line in lines)
    assert main(["explain", f"{CONTROL}?", str(tmp_path / "trace")]) == 2
    assert capsys.readouterr().err[:-1].isprintable()
