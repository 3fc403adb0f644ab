"""Prompts from templates, with a real model's answer lengths."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from bench.workloads import chats
from bench.workloads.prompts import WorkloadError


def test_prompts_are_distinct_and_lengths_vary_within_a_kind() -> None:
    asked = chats.prompts(400)
    assert len({text for text, _ in asked}) == 400
    assert asked == chats.prompts(500)[:400]
    workload = chats.answered()
    by_kind = defaultdict[str, list[int]](list)
    for request in (*workload.history, *workload.evaluation):
        by_kind[request.class_name].append(request.output_tokens)
    assert by_kind.keys() == {kind for _, kind in asked}
    # Of essays most are cut at the cap; all others vary within their kind.
    assert {kind for kind, lengths in by_kind.items() if np.median(lengths) == 1024} == {"essay"}
    assert all(len(set(by_kind[kind])) > 5 for kind in by_kind if kind != "essay")


def test_other_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = json.loads(chats.LENGTHS_FILE.read_text("ascii")) | {"prompts_hash": "of others"}
    (tmp_path / "lengths.json").write_text(json.dumps(known))
    monkeypatch.setattr(chats, "LENGTHS_FILE", tmp_path / "lengths.json")
    with pytest.raises(WorkloadError, match="of other prompts"):
        chats.answered()


def test_generated_prompts_have_lengths_of_their_kind_or_a_tail_that_none_tells() -> None:
    workload = chats.generated(1500)
    assert workload == chats.generated(1500) != chats.generated(1500, seed=1)
    requests = [*workload.history, *workload.evaluation]
    assert len({request.prompt for request in requests}) == 1500
    known = chats.answered()
    pairs = {(r.class_name, r.output_tokens) for r in (*known.history, *known.evaluation)}
    assert {(r.class_name, r.output_tokens) for r in requests} <= pairs

    heavy = workload.with_heavy_tail()
    assert [r.prompt for r in heavy.evaluation] == [r.prompt for r in workload.evaluation]
    factors = np.array([
        after.output_tokens / before.output_tokens
        for before, after in zip(workload.evaluation, heavy.evaluation, strict=True)
        if before.output_tokens > 50
    ])  # fmt: skip
    long, short = factors[factors > 1], factors[factors < 1]
    assert long.size / factors.size == pytest.approx(0.1, abs=0.04)
    assert long.mean() / short.mean() == pytest.approx(20, rel=0.05)
