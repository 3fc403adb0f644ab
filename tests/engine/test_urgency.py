"""Urgent requests on a real server: who says so, and who goes first."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import SageServer, generate


@pytest.fixture
def server(one_slot: SageServer) -> SageServer:
    settings(one_slot, {"schedule_policy": "urgency"})
    return one_slot


def test_the_more_urgent_go_first_by_class_by_priority_and_by_guess(server: SageServer) -> None:
    prompt = "What is to be done about it?"
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "bulk": (prompt, {"priority": -10}),
        "any": (prompt, {}),
        "priority": (prompt, {"priority": -1}),  # of no class: level 4
        "guessed": (f"He bleeds. {prompt}", {}),
        "emergency": (prompt, {"priority": 10}),
    }
    before = server.stats()
    answers = stage.together(
        server,
        [
            partial(generate, server, text, 4, rid=name, **said)
            for name, (text, said) in asked.items()
        ],
    )
    assert stage.started(server) == ["emergency", "guessed", "any", "priority", "bulk"]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [4] * 5
    stats = server.stats()
    guessed = [each["urgency"]["num_guessed"].get("2", 0) for each in (before, stats)]
    assert guessed[1] - guessed[0] == 1
    assert stats["urgency"]["num_failed"] == 0
    counted = Counter(stats["slo"]["num_by_class"])
    assert counted - Counter(before["slo"]["num_by_class"]) == {"emergency": 1, "bulk": 1}
