"""The comparison of answers."""

from __future__ import annotations

import pytest

from tests.checks.exactness import Spoken, Undisturbed, differences


def spoken(ids: list[int], logprobs: list[float]) -> Spoken:
    return Spoken("", ids, logprobs, 0)


def test_answers_that_part_are_counted_and_compared_up_to_there() -> None:
    left = [spoken([1, 2, 3], [-1.0, -2.0, -3.0]), spoken([4], [-1.0]), spoken([5], [-1.0])]
    right = [spoken([1, 9, 3], [-1.25, -8.0, -9.0]), spoken([4], [-1.5]), spoken([5, 6], [-1.0, 0])]
    assert differences(left, right) == (2, 0.5)
    assert differences(left, left) == (0, 0.0)


@pytest.mark.parametrize(
    ("ids", "second", "agrees"),
    [([1, 2], -2.015, True), ([1, 2], -2.025, False), ([1, 9], -2.015, True),
     ([1, 9], -2.025, False)],
)  # fmt: skip
def test_twice_the_rounding_of_batches_is_allowed(
    ids: list[int], second: float, agrees: bool
) -> None:
    many = [spoken([1, 2], [-1.0, -2.0]), spoken([1, 2], [-1.0, -2.0])]
    few = [spoken([1, 2], [-1.0, -2.01]), spoken([1, 2], [-1.0, -2.0])]
    stock = Undisturbed("calm", many, few, alone=many[:1])
    assert stock.agrees_with([many[0], spoken(ids, [-1.0, second])], "cut") == agrees
