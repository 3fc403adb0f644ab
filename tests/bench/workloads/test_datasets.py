"""Workloads made of datasets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import datasets
from bench.workloads.prompt_source import load_workload
from bench.workloads.prompts import WorkloadError
from tests.bench.recordings import write
from tests.bench.workloads.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lengths tell where they come from: 100s are chats, 900s texts, 10s instructions."""

    def save(name: str, *rows: dict[str, Any]) -> None:
        write(tmp_path / f"{name}.jsonl.gz", rows)

    def answer(prompt: str, model: str, tokens: int, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "model": model, "output_tokens": tokens, **more}

    models = (datasets.CHAT_MODEL, 100), (datasets.WRITING_MODEL, 900), ("another", 7)
    things = [(i, f"{verb} thing {i}") for i in range(20) for verb in ("Write a", "Why is a")]
    texts = [(f"A report on {i}", 9) for i in range(20)] + [("x", 9000), ("写一篇 report", 9)]
    tasks = ("news_summ", 50), ("qa", 7)
    save("alpaca_eval", *(answer(t, model, n + i) for i, t in things for model, n in models))
    save("alpaca_davinci003", *(
        answer(f"Name {i}", datasets.INSTRUCTION_MODEL, 10 + i) for i in range(20)
    ))  # fmt: skip
    save("longdoc_leval", *(answer("", datasets.SUMMARY_MODEL, n, task=task) for task, n in tasks))
    save("prompts_pubmed", *({"prompt": f"Summarize {i}"} for i in range(20)))
    save("prompts_document_write", *({"prompt": p, "prompt_tokens": n} for p, n in texts))
    save("math_code_reasoning", *(
        answer(f"Prove {i}", model, 9000 * (i % 3) + i, task="math-l5")
        for i in range(20) for model in (datasets.CHAT_MODEL, datasets.RANKED_MODEL)
    ))  # fmt: skip
    save("oasst_model_eval", *(
        answer(f"Chat {i % 6}", datasets.SAMPLED_MODEL, n * i, greedy=i % 11 == 0, sampling=how)
        for i in range(80) for how, n in (("nucleus", 9), ("contrastive", 7))
    ))  # fmt: skip
    quantiles = {"q": [10, 20, 40, 80, 160, 320, 640, 1280]}
    save("servegen_r1_length_quantiles", {"source": "a", "output": quantiles}, {"source": "b"})
    return tmp_path


def test_requests(folder: Path) -> None:
    found = {}
    for name in ("mixed", "real", "repeated", "reasoning", "samples"):
        workload = load_workload(folder, name)
        said = [each.prompt for each in workload.observations()]
        found[name] = fingerprint((workload.history, workload.drawn(40, seed=1), said))
    assert found == {
        "mixed": "fb8cdde6", "real": "73ca3b64", "repeated": "277d744b", "reasoning": "d04aa440",
        "samples": "4cc37358",
    }  # fmt: skip


def test_an_unusable_row_is_named(folder: Path) -> None:
    file = folder / "prompts_pubmed.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "fine"}\n{"text": "no prompt"}\n'))
    with pytest.raises(WorkloadError, match=r"prompts_pubmed\.jsonl\.gz:2 has no prompt"):
        datasets.load_mixed(folder)
    file.unlink()
    with pytest.raises(WorkloadError, match="there is no file"):
        datasets.load_mixed(folder)
