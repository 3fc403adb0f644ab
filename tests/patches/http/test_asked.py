from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from patches.http.asked import asked_of, asked_of_chat
from predictor_store.predict.asked import Asked

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
    later = [*SAID, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    assert chat().session == chat(messages=later).session
    assert chat().system == chat(messages=later).system
    other = [SAID[0], {"role": "user", "content": "How?"}]
    assert chat().session != chat(messages=other).session
    assert chat(messages=SAID[:1]).session == ""


def test_a_completion_says() -> None:
    sampling = {"max_new_tokens": 50, "stop": ["a", "b"], "regex": "x+"}
    obj = GenerateReqInput(text="x" * 400, sampling_params=sampling, session_params={"id": "one"})
    asked = asked_of(obj, None)  # type: ignore[arg-type]
    assert (asked.max_tokens, asked.num_stops, asked.is_constrained) == (50, 2, True)
    assert asked.input_tokens == 100
    assert asked.session
    others = {asked_of(obj, None, tenant).session for tenant in ("", "a", "b")}  # type: ignore[arg-type]
    assert len(others - {""}) == 3
    ids = GenerateReqInput(input_ids=[1] * 7, sampling_params={})
    assert asked_of(ids, chat()).input_tokens == 7  # type: ignore[arg-type]
    assert asked_of(ids, chat()).session not in {"", asked.session}  # type: ignore[arg-type]


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
