from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads.arrivals import PULSE_REQUESTS, num_requests_of, trace_arrivals
from bench.workloads.prompts import (
    MAX_HISTORY_PER_CLASS,
    Workload,
    WorkloadError,
    WorkloadRequest,
)

prompts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def requests_of(**sizes: int) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(f"{name} {i}", 1 + i, name)
        for name, size in sizes.items()
        for i in range(size)
    ]


@given(st.lists(st.tuples(prompts, st.integers(1, 9)), max_size=30))
def test_no_prompt_is_both_history_and_evaluation(rows: list[tuple[str, int]]) -> None:
    # Once more in other clothes: a duplicate must not cross over.
    dressed = [(f"  {prompt.upper()}\n", length) for prompt, length in rows]
    requests = [WorkloadRequest(prompt, length, "chat") for prompt, length in rows + dressed]
    workload = Workload.split(requests, "")
    assert workload == Workload.split(requests, "")
    assert sorted((*workload.history, *workload.evaluation), key=str) == sorted(requests, key=str)

    def plain(part: tuple[WorkloadRequest, ...]) -> set[str]:
        return {" ".join(request.prompt.casefold().split()) for request in part}

    # "ß".upper() is "SS": casefold makes the two one, so they must have gone one way.
    assert not plain(workload.history) & plain(workload.evaluation)


def test_history_crowds_out_no_class() -> None:
    workload = Workload.split(requests_of(chat=4000, writing=100), "")
    classes = Counter(each.prompt.split()[0] for each in workload.observations())
    assert classes["chat"] == MAX_HISTORY_PER_CLASS
    assert 30 < classes["writing"] == sum(each.class_name == "writing" for each in workload.history)


@pytest.mark.parametrize(
    ("load", "rate", "service_s", "number"),
    [("bursts", 8.0, 20.0, PULSE_REQUESTS), ("sustained", 3.0, 19.0, 570),
     ("sustained", 1e-3, 1.0, 1)],
)  # fmt: skip
def test_sustained_load_goes_on_for_ten_service_times(
    load: str, rate: float, service_s: float, number: int
) -> None:
    assert num_requests_of(load, rate, service_s) == number


def test_a_trace_keeps_its_shape_at_one_a_second(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # Pairs of arrivals 1 s apart, the pairs 9 s apart.
    trace.write_text("\n".join(f'{{"t": {10 * (i // 2) + i % 2}}}' for i in range(200)))
    times = trace_arrivals(trace, 100, seed=0)
    assert times[0] == 0
    assert times[-1] == pytest.approx(100, rel=0.03)
    gaps = np.diff(times)
    assert max(gaps) == pytest.approx(9 * min(gaps))
    with pytest.raises(WorkloadError, match="200 arrivals, 201 are needed"):
        trace_arrivals(trace, 200, seed=0)
    trace.write_text('{"t": 1}\n{"t": "two"}\n')
    with pytest.raises(WorkloadError, match=r"trace\.jsonl:2 has no t of type int \| float"):
        trace_arrivals(trace, 1, seed=0)
