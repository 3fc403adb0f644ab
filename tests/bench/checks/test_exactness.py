from __future__ import annotations

from bench.checks.exactness import Spoken, crowd, differences


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
