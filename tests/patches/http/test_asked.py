from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from patches.http.asked import asked_of, asked_of_chat, scope_of
from predictor_store.predict.asked import OWN, SHAPED, Asked, Scope

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SINCE_0_5_23 = pytest.mark.skipif(
    "thinking" not in ChatCompletionRequest.model_fields, reason="this SGLang has no such field"
)


def chat(**fields: Any) -> Asked:
    return asked_of_chat(ChatCompletionRequest(model="any", **{"messages": SAID, **fields}))


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "thinks", 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinks", -1),
        ({"chat_template_kwargs": {"thinking": True}}, "thinks", 1),
        ({"chat_template_kwargs": {"thinking": "junk"}}, "thinks", 0),
        ({"reasoning_effort": "none"}, "thinks", -1),
        pytest.param({"thinking": {"type": "adaptive"}}, "thinks", 1, marks=SINCE_0_5_23),
        ({"reasoning_effort": "high"}, "effort", 1),
        ({"reasoning_effort": "low"}, "effort", -1),
        ({"reasoning_effort": "medium"}, "effort", 0),
        ({"tools": [TOOL] * 3}, "num_tools", 3),
        ({"tools": [TOOL], "tool_choice": "none"}, "num_tools", 0),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", 1),
        ({"tools": [TOOL]}, "tool_choice", 0),
        ({"response_format": {"type": "json_object"}}, "is_constrained", True),
        ({"response_format": {"type": "text"}}, "is_constrained", False),
        ({}, "num_turns", 2),
        ({"messages": SAID[1:]}, "system", ""),
    ],
)
def test_a_chat_says(fields: dict[str, Any], name: str, value: object) -> None:
    assert getattr(chat(**fields), name) == value


def test_a_conversation_is_known_by_its_beginning() -> None:
    said = chat(messages=[*SAID, {"role": "assistant", "content": "So."}, SAID[1]])
    assert (said.session, said.system) == (chat().session, chat().system)
    other = chat(messages=[SAID[0], {"role": "user", "content": "How?"}])
    assert (other.session != said.session, other.system) == (True, said.system)
    assert chat(messages=SAID[:1]).session == ""


def completion(tenant: str = "", **fields: Any) -> Asked:
    return asked_of(GenerateReqInput(**fields), None, tenant)  # type: ignore[arg-type]


def test_a_completion_says() -> None:
    sampling = {"max_new_tokens": 50, "stop": ["a", "b"], "regex": "x+"}
    asked = completion(text="x" * 400, sampling_params=sampling)
    assert asked == Asked(input_tokens=100, max_tokens=50, num_stops=2, is_constrained=True)
    asked = completion(input_ids=[1] * 7, sampling_params={"max_new_tokens": -5, "stop": "a"})
    assert asked == Asked(input_tokens=7, max_tokens=0, num_stops=1)


def test_a_session_is_that_of_its_tenant_and_scope() -> None:
    fields = {"text": "Why?", "session_params": {"id": "one"}}
    found = [completion(tenant, sampling_params={}, **fields) for tenant in ("", "a", "b")]
    found += [completion(sampling_params={"regex": "x+"}, **fields)]
    found += [asked_of(GenerateReqInput(text="Why?", sampling_params={}), chat())]  # type: ignore[arg-type]
    assert len({asked.session for asked in found} - {""}) == 5


def scope(sampling: dict[str, Any] | None = None, **fields: Any) -> Scope:
    obj = GenerateReqInput(text="Why?", sampling_params=sampling or {}, **fields)
    return scope_of(obj, {2})  # type: ignore[arg-type]


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
    assert scope(custom_logit_processor="code").end == SHAPED
    assert scope(lora_path="a") == Scope("a")
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
