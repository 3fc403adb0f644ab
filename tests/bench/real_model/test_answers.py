"""What is asked of the real model."""

from __future__ import annotations

from collections import Counter

from bench.real_model.answers import repeated
from bench.workloads.chats import prompts


def test_prompts_are_repeated_by_rank() -> None:
    asked = prompts(100)
    further = repeated(asked)
    counts = sorted((1 + n for n in Counter(text for text, _, _ in further).values()), reverse=True)
    assert counts[:4] == [16, 8, 5, 4]
    assert len(set(further)) == len(further)
    assert all(sample > 0 for _, _, sample in further)
    assert {(text, kind) for text, kind, _ in further} <= set(asked)
