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


def yields(t: float, rid: str = "long", to: str = "short") -> dict[str, Any]:
    about = {"way": "to host memory", "reason": "behind"}
    return {"t": t, "is": "preempt", "rid": rid, "to": to, **about}


RESUMES = {"is": "resume", "rid": "long", "reason": "there is room for it", "goes_first": True}
EVENTS: list[dict[str, Any]] = [
    {"t": 0.0, "is": "policy", "name": "sage", "at": 1.0},
    came(1.0, "long", 0, 900),
    starts(1.5, "long", 0.5),
    came(2.0, "short", 1, 10),
    came(2.0, "unknown", 2, None),
    yields(3.0),
    starts(3.0, "short", 1.0),
    ends(4.0, "short"),
    {"t": 4.0, **RESUMES},
    ends(6.0, "long"),
    starts(6.0, "unknown", 4.0),
    ends(7.0, "unknown"),
]


@pytest.mark.parametrize(
    ("rid", "times", "said"),
    [
        ("long", [0.0, 0.5, 2.0, 3.0, 5.0], ["900", "0.500", "short", "overtake", "9 tokens"]),
        ("short", [0.0, 1.0, 1.0, 2.0], ["10", "long is preempted for it", "1.000", "9 tokens"]),
        ("unknown", [0.0, 4.0, 5.0], ["nothing is known", "4.000", "9 tokens"]),
        ("another", [], []),
    ],
)
def test_a_timeline_says_what_happened_when_and_why(
    rid: str, times: list[float], said: list[str]
) -> None:
    assert [event["t"] for event in of_request(EVENTS, rid)] == times
    for line, words in zip(timeline(EVENTS, rid), said, strict=True):
        assert words in line


def test_a_summary_says_which_requests_waited_for_which_and_why() -> None:
    found = summary(EVENTS)
    # long: 0.5 s for none, 1 s for short; short: 1 s for long; unknown: 4 s for both.
    assert (found["num_requests"], found["waited_s"], found["num_preemptions"]) == (3, 6.5, 1)
    assert [*found["waited_for_s"].values()] == [5.0, 1.0, 0.5]
    assert found["num_decided"]["preempt: behind"] == 1
    assert [(wait["rid"], wait["waited_s"]) for wait in found["longest"]] == [
        ("unknown", 4.0), ("long", 1.5), ("short", 1.0),
    ]  # fmt: skip
    assert [(other["rid"], other["seconds"]) for other in found["longest"][0]["for"]] == [
        ("long", 3.0), ("short", 1.0),
    ]  # fmt: skip
    assert "    4.000 s  unknown" in summary_lines(found)


def test_a_trace_is_read_as_far_as_it_goes_and_the_last_run_counts() -> None:
    for number in range(len(EVENTS) + 1):
        summary_lines(summary(EVENTS[number:]))
        for rid in ("long", "short", "unknown"):
            timeline(EVENTS[number:], rid)
    assert last_run([*EVENTS, *EVENTS]) == EVENTS


CONTROL = "a\x1b]0;owned\x07\n    9.000 s  ends"
SOUND = [came(0.0, "a", 0, 3), starts(1.0, "a", 1.0)]
DAMAGED: list[object] = [
    *([{**event, "t": t}] for event in SOUND for t in ("x", None, math.nan, [1], True)),
    *([{name: value for name, value in event.items() if name != left_out}]
      for event in (*SOUND, ends(2.0, "a"), yields(2.0)) for left_out in event),
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
    events = [came(0.0, CONTROL, 0, 9), came(0.0, "b", 1, 3), starts(1.0, CONTROL, 1.0),
              yields(2.0, CONTROL, "b"), ends(3.0, "\ud800")]  # fmt: skip
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, events)))
    for argv in (["--summary"], [CONTROL], ["b"]):
        assert main(["explain", *argv, str(tmp_path / "trace")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("    9.000 s  ends") for line in lines)
    for argv in ([f"{CONTROL}?", str(tmp_path / "trace")], [str(tmp_path / "trace")],
                 ["a", str(tmp_path / "nowhere")]):  # fmt: skip
        assert main(["explain", *argv]) == 2
        assert capsys.readouterr().err[:-1].isprintable()
