from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.workloads import datasets
from bench.workloads.prompts import WorkloadError, sample


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path,
        "alpaca_eval",
        [
            {"prompt": f"{verb} thing {i}", "model": model, "output_tokens": tokens + i}
            for i in range(20)
            for verb in ("Write a", "Why is a")
            for model, tokens in ((datasets.CHAT_MODEL, 100), (datasets.WRITING_MODEL, 900))
        ],
    )
    write(
        tmp_path,
        "alpaca_davinci003",
        [
            {"prompt": f"Name {i}", "model": datasets.INSTRUCTION_MODEL, "output_tokens": 10 + i}
            for i in range(20)
        ],
    )
    write(
        tmp_path,
        "longdoc_leval",
        [{"model": datasets.SUMMARY_MODEL, "task": "news_summ", "output_tokens": 50}] * 3
        + [{"model": datasets.SUMMARY_MODEL, "task": "qa", "output_tokens": 7}] * 3,
    )
    write(tmp_path, "prompts_pubmed", [{"prompt": f"Summarize {i}"} for i in range(20)])
    write(
        tmp_path,
        "prompts_document_write",
        [{"prompt": f"A report on {i}", "prompt_tokens": 9} for i in range(20)]
        + [{"prompt": "x", "prompt_tokens": 9000}, {"prompt": "写一篇文章", "prompt_tokens": 9}],
    )
    return tmp_path


def test_lengths_come_from_the_documented_models(folder: Path) -> None:
    workload = datasets.load_mixed(folder)
    for request in (*workload.history, *workload.evaluation):
        if request.class_name == "instruction":
            assert request.output_tokens == 10 + int(request.prompt.split()[-1])
        elif request.class_name == "chat":
            assert request.output_tokens == 100 + int(request.prompt.split()[-1])
        elif request.class_name == "summarization":
            assert request.output_tokens == 50
        else:
            assert 900 <= request.output_tokens < 920
            assert request.prompt.startswith("A report")
    assert workload == datasets.load_mixed(folder)


def test_an_unusable_row_is_named(folder: Path) -> None:
    write(folder, "prompts_pubmed", [{"prompt": "fine"}, {"text": "no prompt"}])
    with pytest.raises(WorkloadError, match=r"prompts_pubmed\.jsonl\.gz:2 has no prompt"):
        datasets.load_mixed(folder)
    (folder / "prompts_pubmed.jsonl.gz").unlink()
    with pytest.raises(WorkloadError, match="there is no file"):
        datasets.load_mixed(folder)


def test_the_optional_data_suffices_for_several_hundred_requests(shared_data: Path) -> None:
    workload = datasets.load_mixed(shared_data)
    assert len(sample(workload.evaluation, 500, seed=0)) == 500
    means = {
        name: np.mean([r.output_tokens for r in workload.evaluation if r.class_name == name])
        for name in ("instruction", "summarization", "chat", "writing")
    }
    assert list(means.values()) == sorted(means.values())
