"""How far two prompts are alike."""

from __future__ import annotations

from array import array
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from patches.scheduler.view import common_length

prompts = st.lists(st.integers(0, 2), max_size=40)


@given(prompts, prompts, prompts)
def test_the_common_length_is_that_of_the_longest_common_beginning(
    beginning: list[int], one: list[int], two: list[int]
) -> None:
    one, two = beginning * 3 + one, beginning * 3 + two
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    assert common_length(array("q", one), array("q", two)) == len([*alike])
