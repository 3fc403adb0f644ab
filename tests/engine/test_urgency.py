"""Urgent requests on a real server: who says so, and who goes first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from predictor_store.urgency_head import UrgencyHead, hashed
from tests.engine import stage
from tests.engine.conftest import CHECKED
from tests.engine.serving import SageServer, generate, warmed_store

SETTINGS = """
[urgency]
model = "{model}"

[slo]
trust = "body"

[slo.classes.emergency]
priority = 10
urgency = 1

[slo.classes.bulk]
priority = -10
urgency = 5
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[SageServer]:
    """Whoever bleeds is guessed to be of level 2; one slot, so that they go one by one."""
    folder = tmp_path_factory.mktemp("urgency")
    weights = np.zeros((1 << 15, 6), np.float32)
    weights[hashed("bleeds"), 1] = 100.0
    UrgencyHead(weights, np.array([0.0, 0, 20, 0, 0, 0]), 1.0, 4.0).write(folder / "model")
    with SageServer(
        model,
        folder,
        warmed_store(folder / "store"),
        flags=["--max-running-requests", "1"],
        env=CHECKED,
        settings=SETTINGS.format(model=folder / "model"),
        policy="urgency",
    ) as started:
        yield started


def test_the_more_urgent_go_first_by_class_by_priority_and_by_guess(server: SageServer) -> None:
    prompt = "What is to be done about it?"
    asked: dict[str, tuple[str, dict[str, object]]] = {
        "bulk": (prompt, {"priority": -10}),
        "any": (prompt, {}),
        "priority": (prompt, {"priority": -1}),  # of no class: level 4
        "guessed": (f"He bleeds. {prompt}", {}),
        "emergency": (prompt, {"priority": 10}),
    }
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
    assert stats["urgency"]["num_guessed"]["2"] == 1
    assert stats["urgency"]["num_failed"] == 0
    assert stats["slo"]["num_by_class"] == {"emergency": 1, "bulk": 1}
