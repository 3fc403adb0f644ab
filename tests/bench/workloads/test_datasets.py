from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import datasets
from bench.workloads.prompts import WorkloadError, sample


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lengths tell where they come from: 100s are chats, 900s texts, 10s instructions."""
    numbers = range(20)
    chats = [
        {"prompt": f"{verb} thing {i}", "model": model, "output_tokens": tokens + i}
        for i in numbers
        for verb in ("Write a", "Why is a")
        for model, tokens in ((datasets.CHAT_MODEL, 100), (datasets.WRITING_MODEL, 900))
    ]
    instructions = [
        {"prompt": f"Name {i}", "model": datasets.INSTRUCTION_MODEL, "output_tokens": 10 + i}
        for i in numbers
    ]
    summaries = [
        {"model": datasets.SUMMARY_MODEL, "task": task, "output_tokens": tokens}
        for task, tokens in (("news_summ", 50), ("qa", 7))
    ]
    texts = [{"prompt": f"A report on {i}", "prompt_tokens": 9} for i in numbers]
    left_out = [("x", 9000), ("写一篇文章", 9)]
    texts += [{"prompt": prompt, "prompt_tokens": tokens} for prompt, tokens in left_out]
    write(tmp_path, "alpaca_eval", chats)
    write(tmp_path, "alpaca_davinci003", instructions)
    write(tmp_path, "longdoc_leval", summaries)
    write(tmp_path, "prompts_pubmed", [{"prompt": f"Summarize {i}"} for i in numbers])
    write(tmp_path, "prompts_document_write", texts)
    return tmp_path


def test_lengths_come_from_the_documented_models(folder: Path) -> None:
    workload = datasets.load_mixed(folder)
    for request in (*workload.history, *workload.evaluation):
        if request.class_name == "writing":
            assert 900 <= request.output_tokens < 920
            assert request.prompt.startswith("A report")
        elif request.class_name == "summarization":
            assert request.output_tokens == 50
        else:
            base = {"instruction": 10, "chat": 100}[request.class_name]
            assert request.output_tokens == base + int(request.prompt.split()[-1])
    assert workload == datasets.load_mixed(folder)


def test_an_unusable_row_is_named(folder: Path) -> None:
    write(folder, "prompts_pubmed", [{"prompt": "fine"}, {"text": "no prompt"}])
    with pytest.raises(WorkloadError, match=r"prompts_pubmed\.jsonl\.gz:2 has no prompt"):
        datasets.load_mixed(folder)
    (folder / "prompts_pubmed.jsonl.gz").unlink()
    with pytest.raises(WorkloadError, match="there is no file"):
        datasets.load_mixed(folder)


def test_the_optional_data_suffices(shared_data: Path) -> None:
    assert len(sample(datasets.load_mixed(shared_data).evaluation, 500, seed=0)) == 500
    workload = datasets.load_real(shared_data)
    assert {r.class_name for r in workload.evaluation} == {"chat", "gsm", "math-l5", "crux"}
    assert not {r.prompt for r in workload.history} & {r.prompt for r in workload.evaluation}
    repeated = datasets.load_repeated(shared_data)
    shared = {r.prompt for r in repeated.history} & {r.prompt for r in repeated.evaluation}
    assert len(shared) > 100
    assert len(repeated.observations()) == len(repeated.history)
    samples = datasets.load_samples(shared_data)
    drawn = samples.drawn(5 * samples.num_samples, seed=0)
    assert [*Counter(r.prompt for r in drawn).values()] == [samples.num_samples] * 5
