from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from patches.http.validation import check_body, check_prompt, check_tokenized

CONFIG = SimpleNamespace(vocab_size=100, hidden_size=2)


class Manager:
    """longest: the characters of the vocabulary's longest token."""

    def __init__(self, longest: int = 8, num_workers: int = 1, sees: bool = False) -> None:
        self.model_config = CONFIG
        self.mm_processor = object() if sees else None
        self.server_args = SimpleNamespace(tokenizer_worker_num=num_workers)
        self.rid_to_state: dict[str, Any] = {}
        self.get_vocab = lambda: {" ": 0, " " * longest: 1}
        self.tokenizer = self


MANAGER: Any = Manager()
SEEING: Any = Manager(sees=True)


def asked(shows: bool = False, **fields: Any) -> Any:
    ours = {"input_ids": None, "input_embeds": None, "sampling_params": {}, **fields}
    return SimpleNamespace(contains_mm_input=lambda: shows, **ours)


def tokenized(ids: Any, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    params = SamplingParams(**{"max_new_tokens": 2**32, **(sampling or {})})
    params.normalize(SimpleNamespace(encode=lambda text, **more: list(text)))
    return SimpleNamespace(**{"mm_inputs": None, **fields}, input_ids=ids, sampling_params=params)


def body(route: str = "generate_request", **fields: Any) -> None:
    check_body(asked(**fields), route)


def first(**sampling: Any) -> None:
    body(sampling_params=sampling)


def second(**sampling: Any) -> None:
    body(sampling_params=[{}, sampling])


def prompt(**fields: Any) -> None:
    check_prompt(MANAGER, asked(**fields))


def sampling(**given: Any) -> None:
    check_tokenized(MANAGER, asked(), tokenized([3], given))


def tokens(**fields: Any) -> None:
    check_tokenized(MANAGER, asked(), tokenized(array("q", [3, 4]), **fields))


def vertex(**fields: Any) -> None:
    """Check a body of the only route of SGLang without a schema."""
    request = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    check_body(GenerateReqInput(**{**request, **fields}), "vertex_generate")


NAN, WIDE = float("nan"), [1.0, 2.0]
OVERRIDES = PositionalEmbeds([torch.zeros(2)], [0])
SCORES = partial(body, "v1_score_request")
SLOW_REGEX = [
    "([a-z ]+)+[0-9]$", "(a|b|ab){1,30}c", "(a|ab)*c", "[a-z]*[0-9]", "a*a*a*b", "(a*)*",
    "([a-z]{1,9}){1,9}$", "(x+x+)+y", r"(a)\1*b", "(?=(a+)+b)", "(?:(?:a{1,5}){1,5}){1,5}b",
    ["[a-z]{0,250}$"] * 32,
]  # fmt: skip
FAST_REGEX = [
    "", "\n\n+", r"Observation:\s*", "(Human|User|Assistant):", "[.!?]$", r"\s{0,8}END\s{0,8}",
    "(?:ab)+", "[^a]b", r"\d{3}-\d{4}", "(foo|ba[rz])\\b", "(?i)stop",
    r"\s{0,20}END",
]  # fmt: skip
FIELDS: list[tuple[Callable[..., None], str, list[Any], list[Any]]] = [
    *((check, "custom_params", [[], ["x"], "", "x", 0, 1, True, [{"__sage_lengths": 1}]],
       [None, {}, {"a": 1}]) for check in (first, second)),
    *((check, "n", [0, 4097, 10**9, "5"], [None, 4, 4096]) for check in (first, second)),
    *((check, "is_normalized", [True], [None]) for check in (first, second)),
    (body, "sampling_params", [], [None, [], [{"n": 1}, None]]),
    (body, "session_params", [{"id": {}}, {"id": 7}, {"id": "a", "rid": []}, {"offset": "1"}],
     [None, {}, {"id": None}, {"id": "a", "rid": "b", "offset": -1}]),
    # SGLang sets these itself, two of them on its routes for scores alone.
    (body, "lora_id", ["mine"], [None]),
    (SCORES, "lora_id", ["mine"], [None]),
    (body, "multi_item_delimiter_indices", [[0]], [None]),
    (SCORES, "multi_item_delimiter_indices", [], [[0]]),
    (body, "token_indices_to_pool", [[0]], [None]),
    (SCORES, "token_indices_to_pool", [], [[0]]),
    (vertex, "sampling_params", [{"skip_special_tokens": "x"}, [{}, {"max_new_tokens": "5"}], 5],
     [{"max_new_tokens": 5}]),
    (vertex, "session_params", [5], [None]),
    (vertex, "conversation_id", [5], [None]),
    (vertex, "lora_path", [{"a": 1}], [None]),
    (vertex, "stream", [[1]], [True]),
    (vertex, "input_embeds", ["x"], [None]),
    # Tokens beyond the vocabulary. Other prompts are left to SGLang.
    (prompt, "input_ids", [[5, -1], [100], [2**70, 1], [-(2**70)]],
     [None, [], [0, 99], [["a"]], ["a", 1], [None], 7]),
    (prompt, "input_embeds",
     [[[1.0]], [WIDE, [1.0]], [[1.0, NAN]], [[1.0, 1e38]], [[1.0, -1.1e4]], [], 5, "a"],
     [[WIDE, WIDE], [[1e4, -1e4]]]),
    # Numbers that would end a server.
    (tokens, "top_logprobs_num", [101, -1, 1.5, [5], "5", NAN], [0, 100, None]),
    (tokens, "logprob_start_len", [-2, -7, 0.5, 2**31, [0]], [-1, 0, 2**31 - 1]),
    (tokens, "routed_experts_start_len", [-1, 2**31], [0, 2**31 - 1]),
    (tokens, "bootstrap_room", [-1, 2**63], [0, 2**63 - 1]),
    (tokens, "positional_embed_overrides", [{"a": 1}, []], [None, OVERRIDES]),
    (sampling, "beam_width", [2], [1]),
    (sampling, "top_k", [2**31, 2**70, 5.5], [2**31 - 1, -1, 5]),
    (sampling, "max_new_tokens", [2.5, 2**70], [2, None]),
    (sampling, "min_new_tokens", [1.5, 2**31], [0, 5]),
    (sampling, "stop_token_ids", [[100], [-1]], [[0, 99], []]),
    (sampling, "temperature", [1e300, 1.1e6], [0, 1e6]),
    (sampling, "repetition_penalty", [1e-300, 0.009, 2.1], [0.01, 2.0]),
    (sampling, "logit_bias", [{"5": NAN}, {"5": -1.1e4}, {"5": "x"}], [{"5": -1e4}, {}, None]),
    (sampling, "stop_regex", SLOW_REGEX, FAST_REGEX),
    # With a long stop string SGLang searches in more tokens.
    (partial(sampling, stop="x" * 10_000), "stop_regex", [r"\s{0,12}END"], [r"\s{0,11}END"]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "field", "wrong", "right"), FIELDS)
def test_a_field_is_refused_or_accepted(
    check: Callable[..., None], field: str, wrong: list[Any], right: list[Any]
) -> None:
    for value in wrong:
        with pytest.raises(ValueError, match=r"validation error|invalid type|" + field):
            check(**{field: value})
    for value in right:
        check(**{field: value})


def test_searches_of_all_running_requests_are_bounded() -> None:
    def starts(manager: Any, rid: str, **given: Any) -> None:
        request = asked()
        manager.rid_to_state[rid] = SimpleNamespace(obj=request)
        try:
            check_tokenized(manager, request, tokenized([3], given))
        except ValueError:
            del manager.rid_to_state[rid]
            raise

    spaces = "(?: | ){11}b"  # counted as 4,096 ways at each of 8 * 13 characters
    manager: Any = Manager()
    for rid in ("a", "b"):
        starts(manager, rid, stop_regex=spaces)
    starts(manager, "cheap", stop_regex="b")
    with pytest.raises(ValueError, match="beside those of the requests that run now"):
        starts(manager, "c", stop_regex=spaces)
    del manager.rid_to_state["a"]
    starts(manager, "c", stop_regex=spaces)
    for other, more in ((Manager(128), {}), (Manager(num_workers=3), {}), (Manager(), {"n": 3})):
        with pytest.raises(ValueError, match=r"too long to look for\. Give"):
            starts(other, "a", stop_regex=spaces, **more)


@pytest.mark.parametrize(
    ("manager", "request_", "given", "is_refused"),
    [
        # A text model ignores media. If media are read, any tokens may stand for them.
        (MANAGER, asked(shows=True, input_ids=[2**40]), None, True),
        (SEEING, asked(shows=True, input_ids=[2**40]), None, False),
        (SEEING, asked(shows=True, input_ids=[-5]), None, True),
        (SEEING, asked(shows=True), tokenized([2**40], mm_inputs=object()), False),
        (SEEING, asked(shows=True), tokenized([2**40]), True),
        (MANAGER, asked(), tokenized(array("q")), True),
        (MANAGER, asked(), tokenized(array("q", [3])), False),
        (MANAGER, asked(), tokenized(None), False),  # embeddings
        (MANAGER, asked(), tokenized(array("q"), mm_inputs=object()), False),  # a recording
    ],
)
def test_media_and_empty_prompts(manager: Any, request_: Any, given: Any, is_refused: bool) -> None:
    refused = pytest.raises(ValueError, match=r"input_ids|empty")
    with refused if is_refused else nullcontext():
        if given is None:
            check_prompt(manager, request_)
        else:
            check_tokenized(manager, request_, given)
