from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_store.predict.features import NUM_FEATURES, excerpt, features_of

WORDS, HAS_WORDS, ITEMS, HAS_ITEMS, QUESTION = 3, 4, 5, 6, 7


@given(st.text())
def test_any_text_has_features(text: str) -> None:
    found = features_of(text)
    assert found.shape == (NUM_FEATURES,)
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 6


@pytest.mark.parametrize(
    ("text", "words", "items"),
    [
        ("Write an essay of 1,500 words.", 1500, 1500),
        ("Name three good reasons.", 0, 3),
        ("Give me 12 tips, please.", 0, 12),
        ("Ten examples of irony", 0, 10),
        ("Write about the 1990s.", 0, 0),
    ],
)
def test_what_is_asked_for_is_counted(text: str, words: int, items: int) -> None:
    found = features_of(text)
    assert found[WORDS] == pytest.approx(np.log1p(words) / 3)
    assert found[HAS_WORDS] == (words > 0)
    assert found[ITEMS] == pytest.approx(np.log1p(items) / 3)


def test_a_long_prompts_end_is_read() -> None:
    text = "Some report. " * 10_000 + "Summarize this in 50 words, or fewer?"
    found = features_of(text)
    assert found[WORDS] == pytest.approx(np.log1p(50) / 3)
    assert found[QUESTION]
    assert len(excerpt(text)) == 4_000
    assert features_of(excerpt(text)).tolist() == found.tolist()
