"""Computes features of a prompt's wording that predict its answer's length."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

NUM_FEATURES = 14
# Increase this if the features change, so that no store mixes old and new ones.
VERSION = 1
# A prompt states its task at its start or at its end.
_HEAD_CHARS = _TAIL_CHARS = 2_000
MAX_EXCERPT_CHARS = _HEAD_CHARS + _TAIL_CHARS

_DIGITS = re.compile(r"\d+")
# All other patterns are for text in lower case.
_NUMBERS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5,
    "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
}  # fmt: skip
_WORDS_ASKED = re.compile(r"(\d[\d,]{0,6})[ -]*(?:words?|characters)")
_ITEMS_ASKED = re.compile(
    rf"\b(\d[\d,]{{0,6}}|{'|'.join(_NUMBERS)})[ -](?:\w{{1,20}}[ -])?"
    r"(?:sentences?|paragraphs?|lines?|items?|steps|points|examples?|ways|tips|ideas|reasons"
    r"|questions|things|facts|words?)\b",
)
_ITEMS = re.compile(
    r"(?<=\w[ -])(?:sentences?|paragraphs?|lines?|items|steps|points|examples|ways|tips|ideas)",
)
_SHORT = re.compile(
    r"\b(?:brief(?:ly)?|short|concise(?:ly)?|one word|single (?:word|sentence)|yes or no"
    r"|true or false|summar\w+|headline|title|name)\b",
)
_LONG = re.compile(
    r"\b(?:detail\w*|essay|story|article|long|comprehensive|thorough\w*|step[- ]by[- ]step"
    r"|explain\w*|blog|report|script|letter|email|plan|guide)\b",
)
_CODE = re.compile(
    r"\b(?:code|python|function|program|java\w*|sql|html|script|algorithm|c\+\+)(?!\w)"
)


def excerpt(text: str) -> str:
    """Return the part of a prompt that is read: a short prompt whole, and the start and end of a
    long one."""
    if len(text) <= MAX_EXCERPT_CHARS:
        return text
    return text[:_HEAD_CHARS] + text[-_TAIL_CHARS:]


def features_of(text: str) -> NDArray[np.float32]:
    """Return the features of any text, float32, shape (NUM_FEATURES,), each of the order of 1.

    The patterns are English. For other languages only the embedding carries information.
    """
    text = excerpt(text)
    per_char = 1.0 / (len(text) + 1)
    lowered = text.lower()  # searches that ignore case would take twice as long
    words_asked = _number(_WORDS_ASKED.search(lowered))
    return np.array(
        [
            math.log1p(len(text)) / 3,
            math.log1p(text.count("\n")) / 2,
            3 * sum(map(len, _DIGITS.findall(text))) * per_char,
            math.log1p(words_asked) / 3,
            words_asked > 0,
            math.log1p(_number(_ITEMS_ASKED.search(lowered))) / 3,
            _ITEMS.search(lowered) is not None,
            text.rstrip().endswith("?"),
            text.count("?") > 1,
            2 * (len(text) - len(text.encode("ascii", "ignore"))) * per_char,
            _SHORT.search(lowered) is not None,
            _LONG.search(lowered) is not None,
            _CODE.search(lowered) is not None,
            min(len(text.split(None, 8)), 8) / 8,
        ],
        np.float32,
    )


def _number(found: re.Match[str] | None) -> float:
    if found is None:
        return 0.0
    word = found[1].replace(",", "")
    # \d is any script's digit; float reads them all.
    return float(_NUMBERS.get(word) or float(word))
