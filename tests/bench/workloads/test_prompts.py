"""Prompts of workloads, and predictions of their answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads import chats
from bench.workloads.arrivals import trace_arrivals
from bench.workloads.predictors import Predictors, truth
from bench.workloads.prompts import MAX_HISTORY_PER_CLASS, Workload, WorkloadError, WorkloadRequest
from predictor_store.predict import predictor
from sage_sched.app.config import PredictorConfig

prompts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


def requests_of(**sizes: int) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(f"{name} {i}", 1 + i, name)
        for name, size in sizes.items()
        for i in range(size)
    ]


@given(st.lists(st.tuples(prompts, st.integers(1, 9)), max_size=30))
def test_no_prompt_is_both_history_and_evaluation(rows: list[tuple[str, int]]) -> None:
    # Each prompt again, in another form: a duplicate must not cross over.
    dressed = [(f"  {prompt.upper()}\n", length) for prompt, length in rows]
    requests = [WorkloadRequest(prompt, length, "chat") for prompt, length in rows + dressed]
    workload = Workload.split(requests, "")
    assert workload == Workload.split(requests, "")
    assert sorted((*workload.history, *workload.evaluation), key=str) == sorted(requests, key=str)

    def plain(part: tuple[WorkloadRequest, ...]) -> set[str]:
        return {" ".join(request.prompt.casefold().split()) for request in part}

    # "ß".upper() is "SS". Casefold makes the two equal, so they must be on the same side.
    assert not plain(workload.history) & plain(workload.evaluation)


def test_history_crowds_out_no_class() -> None:
    workload = Workload.split(requests_of(chat=4000, writing=100), "")
    classes = Counter(each.prompt.split()[0] for each in workload.observations())
    assert classes["chat"] == MAX_HISTORY_PER_CLASS
    assert 30 < classes["writing"] == sum(each.class_name == "writing" for each in workload.history)
    repeated = replace(workload, zipf=1.0)
    assert len(repeated.observations()) == len(workload.history)


def test_a_trace_needs_enough_arrivals(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    for text, said in (
        ('{"t": 1}\n{"t": 2}', "2 arrivals, 3 are needed"), ('{"t": 1}\n' * 3, "are at one time"),
        ('{"t": 1}\n{"t": "two"}', r"trace\.jsonl:2 has no t of type int \| float"),
    ):  # fmt: skip
        trace.write_text(text)
        with pytest.raises(WorkloadError, match=said):
            trace_arrivals(trace, 2, seed=0)


SHIPPED, PUBLISHED = PredictorConfig(), PredictorConfig(encoder="minilm", threshold=0.8)


@pytest.fixture(scope="module")
def predictors() -> Predictors:
    workload = chats.generated(150)
    found = Predictors(workload, len)
    found.read(workload.evaluation)
    found.read(workload.evaluation, "minilm")
    return found


@pytest.mark.slow
def test_the_predictor_is_the_servers(predictors: Predictors) -> None:
    request = predictors.workload.evaluation[0]
    predicted = predictors.semantic(SHIPPED)(request)
    assert predicted is not None
    again = Predictors(predictors.workload, len)
    again.read([request])
    vector = again._vectors["static", request.prompt]
    served = predictor.predict(again.history("static"), vector)
    assert served is not None
    # The last digits of an embedding depend on its batch.
    assert predicted.lengths.tolist() == served.lengths.tolist()
    assert predicted.weights == pytest.approx(served.weights, rel=1e-4)


@pytest.mark.slow
def test_no_prediction_but_the_truth_depends_on_the_length(predictors: Predictors) -> None:
    request = predictors.workload.evaluation[0]
    other = replace(request, output_tokens=request.output_tokens + 77)
    of_configs = map(predictors.semantic, (SHIPPED, PUBLISHED))
    for predict in (*of_configs, predictors.of_input_length(), predictors.blind()):
        assert predict(request) == predict(other)
    assert truth(request).lengths.tolist() == [request.output_tokens]
