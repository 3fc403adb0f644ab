"""What counts as another answer."""

from __future__ import annotations

import pytest

from tests.checks.exactness import Spoken, Undisturbed, crowd, differences, parting, report


def spoken(ids: list[int], logprobs: list[float]) -> Spoken:
    return Spoken("", ids, logprobs, 0)


def test_answers_that_part_are_counted_and_compared_up_to_there() -> None:
    left = [spoken([1, 2, 3], [-1.0, -2.0, -3.0]), spoken([4], [-1.0]), spoken([5], [-1.0])]
    right = [spoken([1, 9, 3], [-1.25, -8.0, -9.0]), spoken([4], [-1.5]), spoken([5, 6], [-1.0, 0])]
    assert differences(left, right) == (2, 0.5)
    assert differences(left, left) == (0, 0.0)


def test_no_prompt_of_the_crowd_comes_twice() -> None:
    asked = crowd(50)
    assert len({prompt for prompt, _ in asked}) == 50
    assert asked == crowd(50)
    assert asked != crowd(50, seed=1)


def test_two_answers_part_by_what_separates_the_first_tokens_that_differ() -> None:
    one = spoken([1, 2, 3], [-1.0, -2.0, -3.0])
    assert parting((one, spoken([1, 2, 3], [-1.5, -2.0, -3.0]))) is None
    assert parting((one, spoken([1, 9, 3], [-1.0, -2.25, -9.0]))) == pytest.approx(0.25)


def test_answers_that_part_at_a_tie_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    calm = [spoken([1, 2], [-1.0, -2.0]), spoken([1, 2], [-1.0, -2.0])]
    other = [spoken([1, 9], [-1.0, -2.001]), spoken([1, 9], [-1.0, -2.5])]
    assert report("they yield", calm, other, allowed=0.01) == (1, 0.0)
    assert "2 of 2" in capsys.readouterr().out
    assert report("they yield", calm, other)[0] == 2


@pytest.mark.parametrize(
    ("ids", "second", "agrees"),
    [([1, 2], -2.015, True), ([1, 2], -2.025, False), ([1, 9], -2.015, True),
     ([1, 9], -2.025, False)],
)  # fmt: skip
def test_another_server_may_differ_by_twice_what_batching_alone_does(
    ids: list[int], second: float, agrees: bool
) -> None:
    many = [spoken([1, 2], [-1.0, -2.0]), spoken([1, 2], [-1.0, -2.0])]
    few = [spoken([1, 2], [-1.0, -2.01]), spoken([1, 2], [-1.0, -2.0])]
    stock = Undisturbed("calm", many, few, alone=many[:1])
    assert stock.agrees_with([many[0], spoken(ids, [-1.0, second])], "cut") == agrees
