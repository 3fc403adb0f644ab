from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import datasets
from bench.workloads.prompts import WorkloadError, sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lengths tell where they come from: 100s are chats, 900s texts, 10s instructions."""

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))

    def answer(prompt: str, model: str, tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "model": model, "output_tokens": tokens}

    models = (datasets.CHAT_MODEL, 100), (datasets.WRITING_MODEL, 900)
    verbs, tasks = ("Write a", "Why is a"), [("news_summ", 50), ("qa", 7)]
    texts = [(f"A report on {i}", 9) for i in range(20)] + [("x", 9000), ("写一篇文章", 9)]
    answers = [
        answer(f"{verb} thing {i}", model, tokens + i)
        for i in range(20) for verb in verbs for model, tokens in models
    ]  # fmt: skip
    write("alpaca_eval", answers)
    name_it = [answer(f"Name {i}", datasets.INSTRUCTION_MODEL, 10 + i) for i in range(20)]
    write("alpaca_davinci003", name_it)
    summaries = [answer("", datasets.SUMMARY_MODEL, n) | {"task": task} for task, n in tasks]
    write("longdoc_leval", summaries)
    write("prompts_pubmed", [{"prompt": f"Summarize {i}"} for i in range(20)])
    write("prompts_document_write", [{"prompt": p, "prompt_tokens": n} for p, n in texts])
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
    file = folder / "prompts_pubmed.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "fine"}\n{"text": "no prompt"}\n'))
    with pytest.raises(WorkloadError, match=r"prompts_pubmed\.jsonl\.gz:2 has no prompt"):
        datasets.load_mixed(folder)
    file.unlink()
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
