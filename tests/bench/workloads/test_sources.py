"""Requests by their kind: levels of urgency, deadlines, prompts whose lengths are real."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from bench.policies.arm import Arm
from bench.workloads import chats
from bench.workloads.lengths import WithDeadlines, read_lengths
from bench.workloads.prompts import Workload, WorkloadError, WorkloadRequest
from bench.workloads.source import Purpose
from bench.workloads.triage import LENGTHS, SHARES, Urgent
from tests.bench.recordings import azure_like, triage_like


def test_levels_have_their_shares(tmp_path: Path) -> None:
    source = Urgent(triage_like(tmp_path))

    def levels(who: str) -> list[int]:
        arm = Arm(policy="urgency", said_by=who)
        found = source.requests(arm, np.zeros(2000), 5, 1024, Purpose.REPORT)
        return [each.hints.urgency for each in found]

    expert, chance = levels("expert"), levels("chance")
    counts = Counter(expert)
    assert [counts[level] / 2000 for level in range(1, 6)] == pytest.approx(SHARES, abs=0.03)
    assert Counter(chance) == counts
    assert chance != expert
    assert {*levels("nobody")} == {3}
    erring = levels("expert, 0.3 wrong")
    assert np.not_equal(erring, expert).mean() == pytest.approx(0.3, abs=0.03)
    assert {*erring} == {1, 2, 3, 4, 5}
    # Answers that predict do not come.
    assert len(source.history) + len(source.lengths) == 60


def test_without_recordings_there_is_nothing_to_simulate(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError):
        read_lengths(tmp_path, "azure")
    (triage_like(tmp_path) / LENGTHS).unlink()
    with pytest.raises(Exception, match=LENGTHS):
        Urgent(tmp_path)


def test_reports_use_no_lengths_of_tuning(tmp_path: Path) -> None:
    data = azure_like(tmp_path)
    known, tuned, reported = (set(map(tuple, rows)) for rows in read_lengths(data, "azure"))
    assert not known & (tuned | reported)
    assert tuned != reported
    source = WithDeadlines(data, "azure", weights=(2.0, 1.0, 4.0))
    of_class = {name: given.priority for name, given in source.slo().classes.items()}
    assert of_class == {"w1": 1, "w2": 2, "w4": 3}


def test_prompts_that_come_again_do_so_by_zipfs_law_with_other_answers() -> None:
    pool = tuple(
        WorkloadRequest(f"prompt {i}", 10 * i + n, "repeated") for i in range(50) for n in range(4)
    )
    workload = Workload(pool, pool, "", zipf=1.0)
    drawn = workload.drawn(3000, seed=1)
    assert drawn == workload.drawn(3000, seed=1)
    plain = Counter(r.prompt for r in drawn if not r.prompt.endswith("Thanks."))
    plain = Counter({prompt: n for prompt, n in plain.items() if prompt.startswith("prompt")})
    assert plain.total() / 3000 == pytest.approx(2 / 3, abs=0.05)
    (first, most), (_, second) = plain.most_common(2)
    assert most / second == pytest.approx(2, rel=0.3)
    assert len({r.output_tokens for r in drawn if r.prompt == first}) == 4


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
    with pytest.raises(WorkloadError, match="other prompts"):
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
