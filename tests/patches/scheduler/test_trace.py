"""What is traced of a request, as lines of a file and as events of SGLang's spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patches.scheduler import trace as tracing
from patches.scheduler.request import Waits
from patches.scheduler.trace import Trace, trace_of
from sage_sched.distribution import LengthDistribution
from sage_sched.job import Job
from sage_sched.plan import Admit, Preempt, PreemptionMode


class Spans:
    """What is asked of SGLang's trace context, sglang/srt/observability/trace.py."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, dict[str, Any]]] = []

    def trace_event(self, name: str, level: int, attrs: dict[str, Any]) -> None:
        self.events.append((name, level, attrs))


def request(rid: str, arrival: int) -> Any:
    job = Job(arrival, 7, 100, LengthDistribution.from_samples([20] * 9, "history"), 0)
    state = SimpleNamespace(job=job, waits=Waits(0.0, waited_s=1.5, num_before=3))
    stats = SimpleNamespace(trace_ctx=Spans())
    return SimpleNamespace(rid=rid, sage=state, time_stats=stats, output_ids=[])


def traced(trace: Trace) -> tuple[Any, Any]:
    """Two requests, of which the first yields to the second; the second is out of luck."""
    one, two = request("one", 0), request("two", 1)
    trace.policy("sage")
    trace.came(one, 2, 1)
    actions = [
        Preempt(one.sage.job, PreemptionMode.SWAP, "behind", two.sage.job),
        Admit(two.sage.job, "room"),
    ]
    trace.carried_out(actions, {one.sage.job: one, two.sage.job: two}, [two])
    one.sage.waits.since_s = 0.0
    trace.runs(SimpleNamespace(reqs=[one]))  # type: ignore[arg-type]
    trace.ended(one, was_aborted=False)
    return one, two


def test_spans_say_what_was_foreseen_who_yielded_and_how_long_it_waited() -> None:
    one, two = traced(Trace(None, has_spans=True))
    came, yielded, started, ended = one.time_stats.trace_ctx.events
    assert came[0] == "sage.came"
    assert came[2]["p50_tokens"] == 20
    assert came[2]["source"] == "history"
    assert yielded == (
        "sage.preempt",
        1,
        {"reason": "behind", "way": PreemptionMode.SWAP.value, "to": "two"},
    )
    assert started[0] == "sage.starts"
    assert started[2]["waited_s"] > 1.5
    assert ended == ("sage.ends", 1, {"tokens": 0, "why": "done"})
    assert two.time_stats.trace_ctx.events == [
        ("sage.stays", 1, {"reason": "there was no room after all"})
    ]


def test_a_file_says_the_same_and_names_the_requests() -> None:
    lines: list[dict[str, Any]] = []
    file: Any = SimpleNamespace(add=lines.append)
    one, two = traced(Trace(file))
    assert [(line["is"], line.get("rid")) for line in lines] == [
        ("policy", None), ("came", "one"), ("preempt", "one"), ("stays", "two"), ("starts", "one"),
        ("ends", "one"),
    ]  # fmt: skip
    assert one.time_stats.trace_ctx.events == two.time_stats.trace_ctx.events == []


@pytest.mark.parametrize(("rank", "expected"), [(0, True), (1, False)])
def test_one_rank_traces(rank: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(attn_tp_rank=rank, attn_cp_rank=0, dp_rank=None)
    monkeypatch.setattr(tracing, "get_parallel", lambda: parallel)
    scheduler: Any = SimpleNamespace(server_args=SimpleNamespace(enable_trace=True))
    assert (trace_of(scheduler) is not None) is expected
    scheduler.server_args = SimpleNamespace(enable_trace=False)
    assert trace_of(scheduler) is None
