"""What is refused where it comes in, without a server."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from patches.http.door import check_token_ids, check_tokenized, custom_params_of

CONFIG = SimpleNamespace(vocab_size=100)
MANAGER: Any = SimpleNamespace(model_config=CONFIG, mm_processor=None)
SEEING: Any = SimpleNamespace(model_config=CONFIG, mm_processor=object())


def asked(**fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "input_ids": None,
            "sampling_params": {},
            "contains_mm_input": lambda: False,
            **fields,
        }
    )


def tokenized(ids: Any, beam_width: int | None = None, mm_inputs: object = None) -> Any:
    sampling = SimpleNamespace(beam_width=beam_width)
    return SimpleNamespace(input_ids=ids, sampling_params=sampling, mm_inputs=mm_inputs)


@pytest.mark.parametrize("given", [[], ["x"], "", "x", 0, 1, True, [{"__sage_lengths": 1}]])
def test_custom_params_are_an_object(given: Any) -> None:
    with pytest.raises(ValueError, match=r"custom_params is .*, allowed: an object"):
        custom_params_of(asked(sampling_params={"custom_params": given}))


@pytest.mark.parametrize("sampling", [None, {}, {"custom_params": None}, []])
def test_or_there_are_none(sampling: Any) -> None:
    assert custom_params_of(asked(sampling_params=sampling)) is None
    assert custom_params_of(asked(sampling_params={"custom_params": {"a": 1}})) == {"a": 1}


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [([5, -1], "-1"), ([100], "100"), ([2**70, 1], str(2**70)), ([-(2**70)], "-1")],
)
def test_a_token_that_the_model_does_not_have_is_named(ids: list[int], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"^input_ids have {wrong}.*, allowed: 0 to 99$"):
        check_token_ids(MANAGER, asked(input_ids=ids))


def test_other_prompts_are_left_to_sglang() -> None:
    for ids in (None, [], [0, 99], [["a"]], ["a", 1], [None], 7):
        check_token_ids(MANAGER, asked(input_ids=ids))


def test_a_picture_lets_no_token_in_where_it_is_not_read() -> None:
    shown = asked(input_ids=[2**40], contains_mm_input=lambda: True)
    with pytest.raises(ValueError, match="allowed: 0 to 99"):
        check_token_ids(MANAGER, shown)
    # Media stand for whatever they like.
    check_token_ids(SEEING, shown)
    check_tokenized(SEEING, shown, tokenized([2**40], mm_inputs=object()))
    with pytest.raises(ValueError, match="allowed: 0 to 99"):
        check_tokenized(SEEING, shown, tokenized([2**40]))
    with pytest.raises(ValueError, match="-5"):
        check_token_ids(SEEING, asked(input_ids=[-5], contains_mm_input=lambda: True))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        check_tokenized(MANAGER, asked(), tokenized(array("q")))
    check_tokenized(MANAGER, asked(), tokenized(array("q", [3])))
    check_tokenized(MANAGER, asked(), tokenized(None))  # embeddings
    check_tokenized(MANAGER, asked(), tokenized(array("q"), mm_inputs=object()))  # a recording


def test_beam_search_is_refused() -> None:
    with pytest.raises(ValueError, match="beam"):
        check_tokenized(MANAGER, asked(), tokenized(array("q", [3]), beam_width=2))
    check_tokenized(MANAGER, asked(), tokenized(array("q", [3]), beam_width=1))
