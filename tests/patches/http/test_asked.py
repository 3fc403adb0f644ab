from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from msgspec.structs import replace
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from patches.http.asked import asked_of, asked_of_chat, scope_of
from predictor_store.predict.asked import OWN, SHAPED, Asked, Scope, digest
from tests.patches.http.conftest import generate

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
ASKS = {"role": "user", "content": "How?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SINCE_0_5_23 = pytest.mark.skipif(
    "thinking" not in ChatCompletionRequest.model_fields, reason="this SGLang has no such field"
)


def chat(**fields: Any) -> Asked:
    return asked_of_chat(ChatCompletionRequest(model="any", **{"messages": SAID, **fields}))


def about(**others: Any) -> Asked:
    """Return the Asked of the chat SAID, with these fields changed."""
    system = digest("Be brief.")
    plain = Asked(num_turns=2, system=system, session=digest(system, "Why?"))
    return replace(plain, **others)


EFFORTS = {
    "none": 0, "minimal": -1, "low": -1, "medium": 0, "high": 1, "xhigh": 1, "max": 1,
    0.0: -1, 0.29: -1, 0.3: 0, 0.69: 0, 0.7: 1,
}  # fmt: skip
THINKING = {"enabled": 1, "adaptive": 1, "disabled": -1}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, about()),
        ({"chat_template_kwargs": {"enable_thinking": False}}, about(thinks=-1)),
        ({"chat_template_kwargs": {"thinking": True}}, about(thinks=1)),
        ({"chat_template_kwargs": {"thinking": "junk"}}, about()),
        *(({"reasoning_effort": given}, about(effort=effort, thinks=-1 if given == "none" else ANY))
          for given, effort in EFFORTS.items()),
        *(pytest.param({"thinking": {"type": kind}}, about(thinks=thinks), marks=SINCE_0_5_23)
          for kind, thinks in THINKING.items()),
        ({"tools": [TOOL] * 3}, about(num_tools=3)),
        ({"tools": [TOOL], "tool_choice": "none"}, about(tool_choice=-1)),
        ({"tools": [TOOL], "tool_choice": "required"}, about(num_tools=1, tool_choice=1)),
        ({"response_format": {"type": "json_object"}}, about(is_constrained=True)),
        ({"response_format": {"type": "text"}}, about()),
        # A conversation is known by its beginning.
        ({"messages": [*SAID, {"role": "assistant", "content": "So."}, ASKS]}, about(num_turns=4)),
        ({"messages": [{**SAID[0], "role": "developer"}, SAID[1]]}, about()),
        ({"messages": [SAID[0], ASKS]}, about(session=digest(about().system, "How?"))),
        ({"messages": SAID[1:]}, about(num_turns=1, system="", session=digest(digest(), "Why?"))),
        ({"messages": SAID[:1]}, about(num_turns=1, session="")),
    ],
)  # fmt: skip
def test_a_chat_says(fields: dict[str, Any], asked: Asked) -> None:
    assert chat(**fields) == asked


def completion(tenant: str = "", **fields: Any) -> Asked:
    return asked_of(GenerateReqInput(**{"sampling_params": {}, **fields}), None, tenant)


def test_a_completion_says() -> None:
    sampling = {"max_new_tokens": 50, "stop": ["a", "b"], "regex": "x+"}
    asked = completion(text="x" * 400, sampling_params=sampling)
    assert asked == Asked(input_tokens=100, max_tokens=50, num_stops=2, is_constrained=True)
    asked = completion(input_ids=[1] * 7, sampling_params={"max_new_tokens": -5, "stop": "a"})
    assert asked == Asked(input_tokens=7, max_tokens=0, num_stops=1)


def test_a_session_is_that_of_its_tenant_and_scope() -> None:
    named = {"id": "one"}
    for fields in (
        {"session_params": named, "session_id": "two", "conversation_id": "three"},
        {"session_id": "one", "conversation_id": "three"},
        {"conversation_id": "one"},
    ):
        found = [completion(tenant, **fields).session for tenant in ("", "a")]
        assert found == [digest(tenant, "", digest("one")) for tenant in ("", "a")]
    limited = {"regex": "x+"}
    found = [completion(session_params=named, sampling_params=limited).session]
    found += [asked_of(generate(sampling=each), chat()).session for each in (None, limited)]
    found += [asked_of(generate(session_params=named), chat()).session]
    names = [digest("one"), chat().session, chat().session, digest("one")]
    scopes = [scope(limited).name, "", scope(limited).name, ""]
    assert found == [digest("", *each) for each in zip(scopes, names, strict=True)]


def scope(sampling: dict[str, Any] | None = None, **fields: Any) -> Scope:
    return scope_of(generate(sampling=sampling, **fields), {2})


@pytest.mark.parametrize(
    ("sampling", "end"),
    [
        ({}, None),
        ({"temperature": 0.5, "max_new_tokens": 5, "stop": [], "min_new_tokens": 1}, None),
        ({"stop": None, "stop_token_ids": [2], "regex": "", "logit_bias": {}}, None),
        ({"stop": "a"}, OWN),
        ({"stop_token_ids": [2, 3]}, OWN),
        ({"stop_regex": "a"}, OWN),
        ({"logit_bias": {"2": 100}}, SHAPED),
        ({"regex": "a", "stop": "a"}, SHAPED),
        ({"json_schema": "{}"}, SHAPED),
        ({"min_new_tokens": 5}, SHAPED),
        ({"ignore_eos": True}, SHAPED),
    ],
)
def test_limits_that_end_answers_name_scopes(sampling: dict[str, Any], end: str | None) -> None:
    found = scope(sampling)
    assert bool(found.limits) is (end is not None)
    assert found.end == (end or OWN)
    assert found == scope(dict(reversed(sampling.items())))
    others = [scope({"stop": "b"}), scope({"logit_bias": {"2": 99}}), scope({"ebnf": "{}"})]
    assert not found.limits or found.limits not in {other.limits for other in others}


def test_a_logit_processor_is_a_limit_and_an_adapter_is_none() -> None:
    for fields in ({"custom_logit_processor": "code"}, {"max_thinking_tokens": 5}):
        assert scope(**fields).end == SHAPED
    assert scope(lora_path="a") == Scope("a")
    assert scope({"stop": "x"}, lora_path="a") == scope({"stop": "x"})._replace(adapter="a")
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert scope({"regex": nested}) == Scope()  # nothing is raised


@pytest.mark.parametrize("junk", [None, "x", -1, 2**70, [None], {"a": 1}, 1.5, True])
def test_no_junk_raises(junk: object) -> None:
    sampling = {"max_new_tokens": junk, "stop": junk, "regex": junk}
    for params in (sampling, junk):
        obj = SimpleNamespace(
            text=junk, input_ids=junk, sampling_params=params, session_params={"id": junk},
            session_id=junk, conversation_id=junk,
        )  # fmt: skip
        asked = asked_of(obj, None)  # type: ignore[arg-type]
        assert msgspec.convert(msgspec.to_builtins(asked), Asked) == asked
