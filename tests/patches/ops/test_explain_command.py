from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from patches.ops.explain_command import last_run, of_request, summary, summary_lines, timeline
from sage_sched.cli import main


def came(t: float, rid: str, arrival: int, p50_tokens: int | None = 3) -> dict[str, Any]:
    p80_tokens = None if p50_tokens is None else 2 * p50_tokens
    about = {"p50_tokens": p50_tokens, "p80_tokens": p80_tokens, "source": "history"}
    numbers = {"input_tokens": 7, "num_waiting": 4, "num_running": 5}
    return {"t": t, "is": "came", "rid": rid, "arrival": arrival, **about, **numbers}


def starts(t: float, rid: str, waited_s: float, tokens: int = 0, place: Any = 0) -> dict[str, Any]:
    about = {"waited_s": waited_s, "place": place, "tokens": tokens}
    return {"t": t, "is": "starts", "rid": rid, **about}


def ends(t: float, rid: str, tokens: int = 9) -> dict[str, Any]:
    return {"t": t, "is": "ends", "rid": rid, "tokens": tokens, "why": "done"}


def yields(t: float, rid: str = "long", to: str = "short") -> dict[str, Any]:
    about = {"way": "to host memory", "reason": "behind"}
    return {"t": t, "is": "preempt", "rid": rid, "to": to, **about}


EVENTS: list[dict[str, Any]] = [
    {"t": 0.0, "is": "policy", "name": "sage", "at": 1.0},
    came(1.0, "long", 0, 900),
    starts(1.5, "long", 0.5),
    came(2.0, "short", 1, 10),
    came(2.0, "unknown", 2, None),
    yields(3.0),
    starts(3.0, "short", 1.0, place=2),
    {"t": 3.5, "is": "stays", "rid": "long", "reason": "there is no room"},
    came(3.5, "last", 3, 20),
    ends(4.0, "short"),
    {"t": 4.0, "is": "resume", "rid": "long", "reason": "there is room", "goes_first": True},
    starts(5.0, "last", 1.5),
    ends(6.0, "long"),
    starts(6.0, "unknown", 4.0, 3, None),
    ends(7.0, "unknown"),
]
# What the command prints of these events, by its arguments.
EXPLAINED = Path(__file__).with_name("explained.txt")


def explained(
    events: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], *argv: str
) -> list[str]:
    """Write a trace, with text as it is. Return the lines that the command prints."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (tmp_path / "trace").write_text("\n".join(lines))
    assert main(["explain", *argv, str(tmp_path / "trace")]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out.splitlines()


def test_requests_and_waits_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for expected in EXPLAINED.read_text().split("\n\n$ explain ")[1:]:
        arg, *lines = expected.rstrip().splitlines()
        assert explained(EVENTS, tmp_path, capsys, arg) == lines
    assert of_request(EVENTS, "long")[-1] == ends(5.0, "long")
    assert of_request(EVENTS, "another") == []


def test_a_trace_is_read_as_far_as_it_goes_and_the_last_run_counts() -> None:
    for number in range(len(EVENTS) + 1):
        summary_lines(summary(EVENTS[number:]))
        for rid in ("long", "short", "unknown"):
            timeline(EVENTS[number:], rid)
    assert last_run([*EVENTS, *EVENTS]) == EVENTS


CONTROL = "a\x1b]0;owned\x07\n    9.000 s  ends"
SOUND = [came(0.0, "a", 0), starts(1.0, "a", 1.0)]
DAMAGED: list[object] = [
    *([{**event, "t": t}] for event in SOUND for t in ("x", None, math.nan, [1], True)),
    *([{name: value for name, value in event.items() if name != left_out}]
      for event in (*SOUND, ends(2.0, "a"), yields(2.0)) for left_out in event),
    [came(0.0, rid, 0) for rid in (5, ["a"], {}, None)],  # type: ignore[arg-type]
    [{**came(0.0, "b", 0), "arrival": 10**400}], [{"t": 0, "is": ["came"], "rid": "a"}],
    [{"t": 2, "is": "preempt", "to": "a", "reason": "x", "way": "y"}],
    "[" * 100_000, '{"t": ' + "9" * 5000 + "}", "\x00\x00", "5", "",
]  # fmt: skip


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_lines_are_left_out(
    damaged: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*SOUND, damaged] if isinstance(damaged, str) else [*damaged, *SOUND]
    assert explained(events, tmp_path, capsys, "--summary")
    assert explained(events, tmp_path, capsys, "a")


def test_ids_cannot_act_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [came(0.0, CONTROL, 0), came(0.0, "b", 1), starts(1.0, CONTROL, 1.0),
              yields(2.0, CONTROL, "b"), ends(3.0, "\ud800")]  # fmt: skip
    for argv in ("--summary", CONTROL, "b"):
        lines = explained(events, tmp_path, capsys, argv)
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("    9.000 s  ends") for line in lines)
    for wrong in ([f"{CONTROL}?", str(tmp_path / "trace")], [str(tmp_path / "trace")],
                  ["a", str(tmp_path / "nowhere")]):  # fmt: skip
        assert main(["explain", *wrong]) == 2
        assert capsys.readouterr().err[:-1].isprintable()
