from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patches.http.urgency import UrgencyGuess
from predictor_store.urgency.head import BUILTIN, UrgencyHead, hashed
from sage_sched.app.config import UrgencyConfig
from sage_sched.job import NO_HINTS, Hints

CONFUSION = ((2, 1, 0, 0, 0), *[(0, 0, 3, 0, 0)] * 5)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model that gives bleeding patients level 1, and all others level 4."""
    weights = np.zeros((1 << 15, 6), np.float32)
    weights[hashed("bleeds"), 0] = 100.0
    file = tmp_path / "urgency"
    biases = np.array([0.0, 0, 0, 20, 0, 0])
    UrgencyHead(weights, biases, 1.0, 4.0, CONFUSION).write(file)
    return str(file)


@pytest.mark.parametrize(
    ("name", "given", "text", "urgency", "is_guessed"),
    [
        ("", NO_HINTS, "he bleeds", 3, False),
        ("own", NO_HINTS, "he bleeds", 1, True),
        ("own", Hints(session="a"), "good morning", 4, True),
        ("own", Hints(urgency=5), "he bleeds", 5, False),
        ("own", Hints(slo_class="bulk"), "he bleeds", 3, False),
        ("own", NO_HINTS, None, 3, False),
        ("builtin", NO_HINTS, "My father has crushing chest pain and cannot breathe!", 2, True),
        *(("builtin", NO_HINTS, text, 3, True)
          for text in ("Write a poem about the sea.", "Fix this: def f(x): return x +", "")),
    ],
)  # fmt: skip
def test_requests_of_unknown_urgency_are_guessed(
    model: str, name: str, given: Hints, text: str | None, urgency: int, is_guessed: bool
) -> None:
    guess = UrgencyGuess(UrgencyConfig(model if name == "own" else name))
    for _ in range(2):
        assert guess.hints(given, text) == replace(given, urgency=urgency)
    assert guess.stats() == {
        "num_guessed": {f"{urgency}": 2} if is_guessed else {}, "num_failed": 0,
        "confusion": {"own": CONFUSION, "": ()}.get(name, UrgencyHead.read(BUILTIN).confusion),
    }  # fmt: skip


def test_a_failed_guess_is_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = UrgencyGuess(UrgencyConfig(model))
    monkeypatch.setattr(UrgencyHead, "level", lambda self, text: 1 // 0)
    for _ in range(2):
        assert guess.hints(NO_HINTS, "he bleeds") == NO_HINTS
    assert guess.stats()["num_failed"] == 2
