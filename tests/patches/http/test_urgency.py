from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patches.compat import UnsupportedServerError
from patches.http.urgency import UrgencyGuess, refuse_urgency
from predictor_store.urgency.head import UrgencyHead, hashed
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
    ("given", "text", "urgency"),
    [
        (NO_HINTS, "he bleeds", 1),
        (Hints(session="a"), "good morning", 4),
        (Hints(urgency=5), "he bleeds", 5),
        (Hints(slo_class="bulk"), "he bleeds", 3),
        (NO_HINTS, None, 3),
    ],
)
def test_requests_of_unknown_urgency_are_guessed(
    model: str, given: Hints, text: str | None, urgency: int
) -> None:
    guess = UrgencyGuess(UrgencyConfig(model))
    for _ in range(2):
        assert guess.hints(given, text) == replace(given, urgency=urgency)
    num_guessed = {f"{urgency}": 2} if urgency in (1, 4) else {}
    assert guess.stats() == {"num_guessed": num_guessed, "num_failed": 0, "confusion": CONFUSION}
    assert UrgencyGuess(UrgencyConfig()).hints(given, text) == given


def test_the_builtin_one_knows_complaints_and_takes_all_else_for_the_middle() -> None:
    guess = UrgencyGuess(UrgencyConfig("builtin"))
    urgent = "My father has crushing chest pain and cannot breathe, what do I do?"
    others = ("Write a poem about the sea.", "Fix this function: def f(x): return x +", "")
    assert guess.hints(NO_HINTS, urgent).urgency == 2
    assert [guess.hints(NO_HINTS, text).urgency for text in others] == [3, 3, 3]


def test_a_failed_guess_is_counted(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guess = UrgencyGuess(UrgencyConfig(model))
    monkeypatch.setattr(UrgencyHead, "level", lambda self, text: 1 // 0)
    for _ in range(2):
        assert guess.hints(NO_HINTS, "he bleeds") == NO_HINTS
    assert guess.stats()["num_failed"] == 2


def test_a_model_that_cannot_be_used_stops_the_start(model: str, tmp_path: Path) -> None:
    refuse_urgency(UrgencyConfig())
    refuse_urgency(UrgencyConfig(model))
    (tmp_path / "other").write_bytes(b"junk")
    for name in ("other", "missing"):
        with pytest.raises(UnsupportedServerError, match=rf"urgency\.model.*{name}"):
            refuse_urgency(UrgencyConfig(str(tmp_path / name)))
