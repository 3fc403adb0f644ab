from __future__ import annotations

import re

import numpy as np
import pytest

from bench.workloads import synthetic
from bench.workloads.prompts import WorkloadRequest, sample


@pytest.fixture(scope="module")
def requests() -> list[WorkloadRequest]:
    workload = synthetic.generate(3000, seed=0)
    return [*workload.history, *workload.evaluation]


def mean_tokens(requests: list[WorkloadRequest], class_name: str, pattern: str = "") -> float:
    lengths = [
        request.output_tokens
        for request in requests
        if request.class_name == class_name and re.search(pattern, request.prompt)
    ]
    assert len(lengths) > 20
    return float(np.mean(lengths))


def test_each_class_has_its_share_and_distinct_prompts(requests: list[WorkloadRequest]) -> None:
    assert len({request.prompt for request in requests}) == len(requests) == 3000
    for name in ("chat", "summarization", "writing"):
        assert sum(request.class_name == name for request in requests) == 1000


def test_the_same_seed_makes_the_same_workload() -> None:
    assert synthetic.generate(300, seed=1) == synthetic.generate(300, seed=1)
    assert synthetic.generate(300, seed=1) != synthetic.generate(300, seed=2)


def test_class_means_are_the_published_ones(requests: list[WorkloadRequest]) -> None:
    assert mean_tokens(requests, "chat") == pytest.approx(338, rel=0.1)
    assert mean_tokens(requests, "summarization") == pytest.approx(90.7, rel=0.1)
    writing = [r.output_tokens for r in requests if r.class_name == "writing"]
    assert max(writing) <= 2000 * 4 / 3
    assert np.mean(writing) > 2 * 338


def test_the_text_tells_something_of_the_length(requests: list[WorkloadRequest]) -> None:
    assert mean_tokens(requests, "chat", "^In one sentence") < 0.3 * mean_tokens(
        requests, "chat", "thorough answer"
    )
    assert mean_tokens(requests, "writing", "about 150 words") == pytest.approx(200, rel=0.15)
    assert mean_tokens(requests, "summarization", "in one sentence") < 0.4 * mean_tokens(
        requests, "summarization", "each finding"
    )


def test_the_text_does_not_tell_all(requests: list[WorkloadRequest]) -> None:
    lengths = [r.output_tokens for r in requests if "of about 200 words" in r.prompt]
    assert np.std(np.log(lengths)) == pytest.approx(synthetic.NOISE, rel=0.25)


def test_summarization_has_the_long_inputs(requests: list[WorkloadRequest]) -> None:
    words = {
        name: np.mean([len(r.prompt.split()) for r in requests if r.class_name == name])
        for name in ("chat", "summarization", "writing")
    }
    assert words["summarization"] > 10 * max(words["chat"], words["writing"])


def is_heavy(request: WorkloadRequest) -> bool:
    return request.output_tokens > 300


def test_a_tenth_is_twenty_times_longer_and_no_prompt_tells_which() -> None:
    workload = synthetic.generate_heavy_tailed(3000, seed=0)
    requests = [*workload.history, *workload.evaluation]
    assert len({request.prompt for request in requests}) == 3000
    heavy = [r.output_tokens for r in requests if is_heavy(r)]
    light = [r.output_tokens for r in requests if not is_heavy(r)]
    assert len(heavy) / len(requests) == pytest.approx(0.1, abs=0.02)
    in_a_run = sum(is_heavy(r) for r in sample(workload.evaluation, 600, seed=0)) / 600
    assert in_a_run == pytest.approx(0.1, abs=0.04)
    assert np.mean(heavy) / np.mean(light) == pytest.approx(20, rel=0.05)
    detailed = [r for r in requests if "thorough answer" in r.prompt]
    share = sum(is_heavy(r) for r in detailed) / len(detailed)
    assert share == pytest.approx(0.1, abs=0.05)
