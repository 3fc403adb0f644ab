"""What counts as another answer."""

from __future__ import annotations

import pytest

from bench.checks.cuts import parting
from bench.checks.exactness import Spoken


def spoken(ids: list[int], logprobs: list[float]) -> Spoken:
    return Spoken("", ids, logprobs, 0)


def test_two_answers_part_by_what_separates_the_first_tokens_that_differ() -> None:
    one = spoken([1, 2, 3], [-1.0, -2.0, -3.0])
    assert parting((one, spoken([1, 2, 3], [-1.5, -2.0, -3.0]))) is None
    assert parting((one, spoken([1, 9, 3], [-1.0, -2.25, -9.0]))) == pytest.approx(0.25)
