"""Refuses requests (status 400) that would end a scheduler of SGLang, or that cannot be read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from patches.compat import contract_error
from patches.http.incoming import Incoming, incoming

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
# SGLang makes tensors of these numbers, or counts by them, without a check of their range. The
# first table is for fields of a request, the second for its sampling parameters. In float32, some
# values beyond these ranges give probabilities of NaN.
_NUMBERS = {
    "logprob_start_len": (-1, _INT32),
    "routed_experts_start_len": (0, _INT32),
    "bootstrap_room": (0, _INT64),
}
_SAMPLING_NUMBERS = {
    "top_k": (1, _INT32),
    "max_new_tokens": (0, _INT64),
    "min_new_tokens": (0, _INT32),
    "temperature": (0.0, 1e6),
    "repetition_penalty": (0.01, 2),
}
_MOST_BIAS = _MOST_EMBEDDING = 1e4
_MOST_SAMPLES = 4096
# Fields that SGLang sets itself, the first ones on its routes for scores. With a client's values,
# its look-ups would be out of range, or would find nothing.
_OF_SCORES = ("multi_item_delimiter_indices", "token_indices_to_pool")
_OF_SGLANG = ("lora_id",)
_SCORING_ROUTES = ("v1_score_request", "v1_decisions_request", "v1_rerank_request")
# SGLang looks up sessions by the ids, and cuts their prompts at the offset, without type checks.
_SESSION_FIELDS = {"id": str, "rid": str, "offset": int}
# With this field, SGLang takes the other sampling parameters unchecked, for example a temperature
# of 0. It refuses the field on /generate only, and since 0.5.23.
_NORMALIZED = "is_normalized"
# The only route whose fields SGLang does not check.
_UNCHECKED_ROUTE = "vertex_generate"
# SGLang searches for stop_regex in each decode step: in the last tokens, or in the whole answer if
# a match has no length limit. All running requests together take at most this many steps of
# Python's matcher in each decode step, about 0.1 s.
_CHARS_OF_ANSWER = 100_000
_MOST_REGEX_STEPS = 1e6
# The longest token if there is no tokenizer. Usual vocabularies have runs of 128 spaces.
_MOST_CHARS_OF_TOKEN = 128


def check_body(obj: GenerateReqInput, route: str | None) -> None:
    """Raise ValueError for a body that must not reach SGLang's code.

    These are bodies with custom_params that are no object, with more samples than the HTTP process
    has memory for, with session_params of other types, or with fields that only a route of SGLang
    may set.

    route: the name of the route's function; None if the request did not come by HTTP.
    """
    if route == _UNCHECKED_ROUTE:
        _check_fields(obj)
    if route is not None:
        for name in (*_OF_SGLANG, *(() if route in _SCORING_ROUTES else _OF_SCORES)):
            if (given := getattr(obj, name, None)) is not None:
                raise ValueError(f"{name} is {given!r:.40}, allowed: none")
    for name, kind in _SESSION_FIELDS.items():
        given = (getattr(obj, "session_params", None) or {}).get(name)
        if not isinstance(given, kind | None):
            raise ValueError(f"session_params.{name} is {given!r:.40}, allowed: {kind.__name__}")
    each = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for sampling in each:
        given = sampling if isinstance(sampling, dict) else {}
        if (is_normalized := given.get(_NORMALIZED)) is not None:
            raise ValueError(f"{_NORMALIZED} is {is_normalized!r:.40}, allowed: none")
        if not isinstance(custom := given.get("custom_params"), dict | None):
            raise ValueError(f"custom_params is {custom!r:.80}, allowed: an object")
        if (num_samples := given.get("n")) is not None:
            _check_range("n", num_samples, 1, _MOST_SAMPLES)


def _check_fields(obj: GenerateReqInput) -> None:
    """Raise ValueError unless all fields have their types, as SGLang does on /generate."""
    fields = dataclasses.fields(obj)
    given = {f.name: value for f in fields if (value := getattr(obj, f.name)) != f.default}
    _fields_of_request().validate_python(given)
    if said := contract_error(given):
        raise ValueError(said)


@functools.cache
def _fields_of_request() -> pydantic.TypeAdapter[GenerateReqInput]:
    return pydantic.TypeAdapter(GenerateReqInput)


def check_prompt(manager: TokenizerManager, obj: GenerateReqInput) -> None:
    """Raise ValueError for token ids beyond the model's vocabulary, or embeddings of another shape:
    both would end the scheduler.

    Ids of a prompt with media are checked once it is known whether the media are read
    (check_tokenized).
    """
    _check(obj.input_ids, manager, has_media=reads_media(manager, obj))
    if obj.input_embeds is not None:
        _check_embeddings(obj.input_embeds, manager.model_config.hidden_size)


def reads_media(manager: TokenizerManager, obj: GenerateReqInput) -> bool:
    """Whether a request may have ids that stand for media. A text model ignores media."""
    return manager.mm_processor is not None and bool(obj.contains_mm_input())


def _check(ids: Any, manager: TokenizerManager, *, has_media: bool) -> None:
    try:
        least, most = min(ids), max(ids)
        is_below, is_above = least < 0, most >= manager.model_config.vocab_size
    except (TypeError, ValueError):
        return  # there are none, or SGLang reports the fault
    if is_below or (is_above and not has_media):
        wrong, last = least if is_below else most, manager.model_config.vocab_size - 1
        raise ValueError(f"input_ids have {wrong!r:.40}, allowed: 0 to {last}")


def check_tokenized(
    manager: TokenizerManager, obj: GenerateReqInput, tokenized: TokenizedGenerateReqInput
) -> None:
    """Raise ValueError for a tokenized request that SGLang cannot serve safely.

    - An empty prompt.
    - Media that were not read: SGLang would then look up all ids.
    - Numbers that end a scheduler or make it very slow.
    - Beam search, whose slots SGLang miscounts.
    """
    ids = tokenized.input_ids
    if reads_media(manager, obj) and tokenized.mm_inputs is None:
        _check(ids, manager, has_media=False)
    if ids is not None and not len(ids) and tokenized.mm_inputs is None:
        raise ValueError("the prompt is empty: it has no tokens")
    _check_numbers(tokenized, manager.model_config.vocab_size)
    _check_sampling(tokenized.sampling_params, manager.model_config.vocab_size)
    _check_regex(manager, obj, tokenized.sampling_params)
    if (getattr(tokenized.sampling_params, "beam_width", None) or 1) > 1:
        raise ValueError(
            "beam_width above 1: beam search is not supported, because it can end the server when "
            "its slots are full"
        )


def _check_range(name: str, value: object, least: float, most: float) -> None:
    # NaN is in no range. Integer bounds ask for integers: SGLang would count with a max_new_tokens
    # of 2.5 until its scheduler ends.
    is_whole = isinstance(least, int)
    if not isinstance(value, int if is_whole else int | float) or not least <= value <= most:
        what = "a whole number, " if is_whole else ""
        raise ValueError(f"{name} is {value!r:.40}, allowed: {what}{least} to {most}")


def _check_all(name: str, values: object, least: float, most: float) -> None:
    """Raise ValueError unless all numbers of a collection are in range. None passes."""
    if values is None:
        return
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ValueError(f"{name} is {values!r:.40}, allowed: numbers from {least} to {most}")
    for value in values:
        _check_range(name, value, least, most)


def _check_embeddings(rows: Any, width: int) -> None:
    given: NDArray[np.float32] = np.empty((0, 0), np.float32)
    with contextlib.suppress(TypeError, ValueError):  # e.g. rows of different width
        given = np.asarray(rows, np.float32)
    # NaN fails this comparison.
    if given.ndim != 2 or given.shape[-1] != width or not (np.abs(given) <= _MOST_EMBEDDING).all():
        raise ValueError(
            f"input_embeds are not rows of {width} numbers from {-_MOST_EMBEDDING} to "
            f"{_MOST_EMBEDDING}"
        )


def _check_numbers(tokenized: TokenizedGenerateReqInput, vocab_size: int) -> None:
    for name, (least, most) in (_NUMBERS | {"top_logprobs_num": (0, vocab_size)}).items():
        if (value := getattr(tokenized, name, None)) is not None:
            _check_range(name, value, least, most)
    overrides = getattr(tokenized, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError(f"positional_embed_overrides is {overrides!r:.40}, allowed: none")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    for name, (least, most) in _SAMPLING_NUMBERS.items():
        if (value := getattr(sampling, name, None)) is not None:
            _check_range(name, value, least, most)
    # If another request has min_new_tokens, SGLang looks up the stop tokens of this one too.
    _check_all("stop_token_ids", getattr(sampling, "stop_token_ids", None), 0, vocab_size - 1)
    biases = getattr(sampling, "logit_bias", None) or {}
    _check_all("logit_bias", biases.values(), -_MOST_BIAS, _MOST_BIAS)


def _check_regex(
    manager: TokenizerManager, obj: GenerateReqInput, sampling: SamplingParams
) -> None:
    """Raise ValueError if a stop_regex, together with those of other running requests, may keep a
    scheduler busy in each step. Python's matcher tries all ways to match; this bounds their number
    for any text."""
    patterns = getattr(sampling, "stop_regex_strs", None) or ()
    if not patterns:
        return
    num_tokens = max(sampling.stop_regex_max_len, sampling.stop_str_max_len) + 1
    num_chars = min(_longest_token(manager.tokenizer) * num_tokens, _CHARS_OF_ANSWER)
    num_steps = 0.0
    for pattern in patterns:
        parsed = list(sre_parser.parse(pattern))
        # Nothing follows a repetition at the end, so its first way is taken.
        is_open = bool(parsed) and parsed[-1][0] in _REPEATS and _ways(parsed[-1][1][2]) == 1
        num_steps += num_chars * _ways(parsed[:-1] if is_open else parsed)
    num_steps *= getattr(sampling, "n", None) or 1
    # Each HTTP process knows its own requests.
    most = _MOST_REGEX_STEPS / max(1, manager.server_args.tokenizer_worker_num)
    if num_steps > most:
        raise ValueError(
            f"stop_regex is {patterns!r:.80}, which can take too long to look for. Give "
            "repetitions a small upper bound, as in {0,8}, and do not nest them"
        )
    # Samples share the state of their request.
    running = {id(kept): kept for kept in map(_kept, manager.rid_to_state.values()) if kept}
    running.pop(id(incoming(obj)), None)
    if num_steps + sum(kept.num_regex_steps for kept in running.values()) > most:
        raise ValueError(
            f"stop_regex is {patterns!r:.80}, which can take too long to look for beside those of "
            "the requests that run now: ask again later, or give a simpler one"
        )
    incoming(obj).num_regex_steps = num_steps


def _kept(state: Any) -> Incoming | None:
    return getattr(state.obj, "sage", None)


@functools.cache
def _longest_token(tokenizer: Any) -> int:
    """Return an upper bound on the characters of a token. A vocabulary has at least one character
    for each."""
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else ()
    return max(map(len, vocabulary), default=_MOST_CHARS_OF_TOKEN)


_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_ONE_WAY = (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY, sre.AT)


def _ways(parsed: Iterable[tuple[Any, Any]]) -> float:
    """Return an upper bound on the ways in which a part of a pattern matches from one place in any
    text."""
    num = 1.0
    for kind, of in parsed:
        if kind in _REPEATS:
            least, most, inner = of
            each = _ways(inner)
            if most == sre.MAXREPEAT:
                return math.inf
            num *= most - least + 1 if each == 1 else min(each, 1e9) ** min(most + 1, 30)
        elif kind == sre.BRANCH:
            num *= sum(map(_ways, of[1]))
        elif kind in (sre.SUBPATTERN, sre.ATOMIC_GROUP, sre.ASSERT, sre.ASSERT_NOT):
            num *= _ways(of if kind == sre.ATOMIC_GROUP else of[-1])
        elif kind not in _ONE_WAY:  # a reference to a group, for example
            return math.inf
    return num
