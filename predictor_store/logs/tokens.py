"""Counts the tokens of texts."""

from __future__ import annotations

from typing import Any


def num_tokens(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of a text, at least 1."""
    # The tokenizer takes UTF-8, which has no lone surrogates.
    tokenizable = text.encode("utf-8", "replace").decode("utf-8")
    found = tokenizer(tokenizable, add_special_tokens=False, verbose=False)["input_ids"]
    return max(1, len(found))
