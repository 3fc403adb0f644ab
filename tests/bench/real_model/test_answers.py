"""What is asked of the real model, and in which order its answers are told."""

from __future__ import annotations

from collections import Counter

from bench.real_model.answers import Answered, repeated
from bench.real_model.prediction import streams
from bench.workloads.chats import prompts


def test_prompts_are_repeated_by_rank() -> None:
    asked = prompts(100)
    further = repeated(asked)
    counts = sorted((1 + n for n in Counter(text for text, _, _ in further).values()), reverse=True)
    assert counts[:4] == [16, 8, 5, 4]
    assert len(set(further)) == len(further)
    assert all(sample > 0 for _, _, sample in further)
    assert {(text, kind) for text, kind, _ in further} <= set(asked)


def test_streams_hold_every_answer_once_in_an_order_of_their_own() -> None:
    answers = [Answered(f"prompt {i % 7}", "fact", i // 7, 9, i + 1, False, "") for i in range(21)]
    found = streams(answers)
    once, all_of_them = found["generated prompts, each once"], found["generated prompts, repeated"]
    assert sorted(each.output_tokens for each in once) == [*range(1, 8)]
    assert sorted(each.output_tokens for each in all_of_them) == [*range(1, 22)]
    assert streams(answers[::-1]) == found != {name: x[::-1] for name, x in found.items()}
