"""Requests that are refused as they come in."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from patches.http.validation import check_body, check_prompt, check_tokenized

CONFIG = SimpleNamespace(vocab_size=100, hidden_size=2)
MANAGER: Any = SimpleNamespace(model_config=CONFIG, mm_processor=None)
SEEING: Any = SimpleNamespace(model_config=CONFIG, mm_processor=object())


def asked(**fields: Any) -> Any:
    return SimpleNamespace(
        **{
            "input_ids": None,
            "input_embeds": None,
            "sampling_params": {},
            "contains_mm_input": lambda: False,
            **fields,
        }
    )


def tokenized(
    ids: Any, mm_inputs: object = None, sampling: dict[str, Any] | None = None, **fields: Any
) -> Any:
    params = SamplingParams(**(sampling or {}))
    params.normalize(SimpleNamespace(encode=lambda text, **more: list(text)))
    return SimpleNamespace(input_ids=ids, sampling_params=params, mm_inputs=mm_inputs, **fields)


@pytest.mark.parametrize("given", [[], ["x"], "", "x", 0, 1, True, [{"__sage_lengths": 1}]])
def test_custom_params_are_an_object_or_none(given: Any) -> None:
    for sampling in ({"custom_params": given}, [{}, {"custom_params": given}]):
        with pytest.raises(ValueError, match=r"custom_params is .*, allowed: an object"):
            check_body(asked(sampling_params=sampling), "any")
    for right in (None, {}, {"custom_params": None}, [], {"custom_params": {"a": 1}}):
        check_body(asked(sampling_params=right), "any")


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [([5, -1], "-1"), ([100], "100"), ([2**70, 1], str(2**70)), ([-(2**70)], "-1")],
)
def test_a_token_beyond_the_vocabulary_is_refused(ids: list[int], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"^input_ids have {wrong}.*, allowed: 0 to 99$"):
        check_prompt(MANAGER, asked(input_ids=ids))


def test_other_prompts_are_left_to_sglang() -> None:
    for ids in (None, [], [0, 99], [["a"]], ["a", 1], [None], 7):
        check_prompt(MANAGER, asked(input_ids=ids))


def test_media_that_are_not_read_let_no_token_in() -> None:
    shown = asked(input_ids=[2**40], contains_mm_input=lambda: True)
    with pytest.raises(ValueError, match="allowed: 0 to 99"):
        check_prompt(MANAGER, shown)
    # Tokens that stand for media may be any.
    check_prompt(SEEING, shown)
    check_tokenized(SEEING, shown, tokenized([2**40], mm_inputs=object()))
    with pytest.raises(ValueError, match="allowed: 0 to 99"):
        check_tokenized(SEEING, shown, tokenized([2**40]))
    with pytest.raises(ValueError, match="-5"):
        check_prompt(SEEING, asked(input_ids=[-5], contains_mm_input=lambda: True))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        check_tokenized(MANAGER, asked(), tokenized(array("q")))
    check_tokenized(MANAGER, asked(), tokenized(array("q", [3])))
    check_tokenized(MANAGER, asked(), tokenized(None))  # embeddings
    check_tokenized(MANAGER, asked(), tokenized(array("q"), mm_inputs=object()))  # a recording


NAN, WIDE = float("nan"), [1.0, 2.0]
OVERRIDES = PositionalEmbeds([torch.zeros(2)], [0])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"beam_width": 2}, {"beam_width": 1}),
        ({"top_k": 2**31}, {"top_k": 2**31 - 1}),
        ({"top_k": 2**70}, {"top_k": -1}),
        ({"top_k": 5.5}, {"top_k": 5}),
        ({"max_new_tokens": 2.5}, {"max_new_tokens": 2}),
        ({"min_new_tokens": 1.5}, {"min_new_tokens": 1}),
        ({"min_new_tokens": 2**31, "max_new_tokens": 2**32}, {"min_new_tokens": 5}),
        ({"max_new_tokens": 2**70}, {"max_new_tokens": None}),
        ({"stop_token_ids": [100]}, {"stop_token_ids": [0, 99]}),
        ({"stop_token_ids": [-1]}, {"stop_token_ids": []}),
        ({"temperature": 1e300}, {"temperature": 0}),
        ({"repetition_penalty": 1e-300}, {"repetition_penalty": 0.5}),
        ({"logit_bias": {"5": NAN}}, {"logit_bias": {"5": -100.0}}),
        ({"logit_bias": {"5": 1e308}}, {"logit_bias": {}}),
        ({"logit_bias": {"5": "x"}}, {"logit_bias": None}),
    ],
)
def test_sampling_that_ends_a_server_fails(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        check_tokenized(MANAGER, asked(), tokenized([3], sampling=wrong))
    check_tokenized(MANAGER, asked(), tokenized([3], sampling=right))


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("top_logprobs_num", [101, -1, 1.5, [5], "5", NAN], [0, 100, None]),
        ("logprob_start_len", [-2, -7, 0.5, 2**31, [0]], [-1, 0, 7]),
        ("bootstrap_room", [-1, 2**63], [0, 2**63 - 1]),
        ("positional_embed_overrides", [{"a": 1}, []], [None, OVERRIDES]),
    ],
)
def test_numbers_that_end_a_server_fail(field: str, wrong: list[Any], right: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=field):
            check_tokenized(MANAGER, asked(), tokenized(array("q", [3, 4]), **{field: value}))
    for value in right:
        check_tokenized(MANAGER, asked(), tokenized(array("q", [3, 4]), **{field: value}))


@pytest.mark.parametrize("rows", [[[1.0]], [WIDE, [1.0]], [[1.0, NAN]], [[1.0, 1e38]], [], 5, "a"])
def test_embeddings_of_another_model_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="input_embeds are not rows of 2 numbers"):
        check_prompt(MANAGER, asked(input_embeds=rows))
    check_prompt(MANAGER, asked(input_embeds=[WIDE, WIDE]))


@pytest.mark.parametrize("field", ["multi_item_delimiter_indices", "token_indices_to_pool"])
def test_only_routes_for_scores_give_delimiters(field: str) -> None:
    given = asked(**{field: [0]})
    with pytest.raises(ValueError, match=field):
        check_body(given, "generate_request")
    check_body(given, "v1_score_request")
    check_body(given, None)
    for route in ("generate_request", "v1_score_request"):
        with pytest.raises(ValueError, match="lora_id is 'mine'"):
            check_body(asked(lora_id="mine"), route)


@pytest.mark.parametrize("wrong", [{"id": {}}, {"id": 7}, {"id": "a", "rid": []}, {"offset": "1"}])
def test_a_session_has_the_types_that_schedulers_look_up(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^session_params"):
        check_body(asked(session_params=wrong), "generate_request")
    for right in (None, {}, {"id": None}, {"id": "a", "rid": "b", "offset": -1}):
        check_body(asked(session_params=right), "generate_request")


def test_the_number_of_samples_is_bounded() -> None:
    for n in (0, 5000, 10**9, "5"):
        with pytest.raises(ValueError, match=r"^n is"):
            check_body(asked(sampling_params={"n": n}), "any")
        with pytest.raises(ValueError, match=r"^n is"):
            check_body(asked(sampling_params=[{}, {"n": n}]), "any")
    for sampling in (None, {}, {"n": None}, {"n": 4}, [{"n": 1}, None]):
        check_body(asked(sampling_params=sampling), "any")


def test_clients_cannot_skip_normalization() -> None:
    of_sglang = {"is_normalized": True, "temperature": 0.0}
    for sampling in (of_sglang, [{}, of_sglang]):
        with pytest.raises(ValueError, match="is_normalized is True"):
            check_body(asked(sampling_params=sampling), "any")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling_params": {"skip_special_tokens": "x"}},
        {"sampling_params": [{}, {"max_new_tokens": "5"}]},
        {"sampling_params": 5},
        {"session_params": 5},
        {"conversation_id": 5},
        {"lora_path": {"a": 1}},
        {"stream": [1]},
        {"input_embeds": "x"},
    ],
)
def test_a_route_without_a_schema_is_checked(wrong: dict[str, Any]) -> None:
    right = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    check_body(GenerateReqInput(**right), "vertex_generate")
    with pytest.raises(ValueError, match=r"validation error|invalid type"):
        check_body(GenerateReqInput(**{**right, **wrong}), "vertex_generate")


@pytest.mark.parametrize(
    "patterns",
    [
        "([a-z ]+)+[0-9]$", "(a|b|ab){1,30}c", "(a|ab)*c", "[a-z]*[0-9]", "a*a*a*b", "(a*)*",
        "([a-z]{1,9}){1,9}$", "(x+x+)+y", r"(a)\1*b", "(?=(a+)+b)", "(?:(?:a{1,5}){1,5}){1,5}b",
        ["[a-z]{0,250}$"] * 32,
    ],
)  # fmt: skip
def test_a_slow_stop_regex_is_refused(patterns: str | list[str]) -> None:
    with pytest.raises(ValueError, match="stop_regex is"):
        check_tokenized(MANAGER, asked(), tokenized([3], sampling={"stop_regex": patterns}))


@pytest.mark.parametrize(
    "pattern",
    [
        "", "\n\n+", r"Observation:\s*", "(Human|User|Assistant):", "[.!?]$", r"\s{0,8}END\s{0,8}",
        "(?:ab)+", "[^a]b", r"\d{3}-\d{4}", "(foo|ba[rz])\\b", "(?i)stop",
    ],
)  # fmt: skip
def test_a_fast_stop_regex_is_accepted(pattern: str) -> None:
    check_tokenized(MANAGER, asked(), tokenized([3], sampling={"stop_regex": pattern}))
