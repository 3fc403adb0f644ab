"""The real model behind a server under sage, asked as OpenAI's clients ask."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from bench.engines.server.policy_server import scheduler_state
from bench.engines.server.server import Server
from bench.real_model.fetch import FetchError
from bench.real_model.server import serve

pytestmark = [pytest.mark.long, pytest.mark.server]

DOCUMENT = " ".join(
    f"Room {i} of the museum shows {what} and is closed on {day}."
    for i, (what, day) in enumerate(
        [("coins", "Monday"), ("clocks", "Tuesday"), ("maps", "Friday"), ("masks", "Sunday")] * 8
    )
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        made = serve("sage", tmp_path_factory.mktemp("real_model"))
    except FetchError as error:
        pytest.skip(f"the real model cannot be had: {error}")
    with made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=900)


def ask(client: openai.OpenAI, *turns: str, **more: object) -> openai.types.chat.ChatCompletion:
    """A chat whose turns are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    asked = {"model": "default", "temperature": 0, "max_tokens": 60, **more}
    return client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "What is the capital of France? Answer in one sentence.").choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    question = "Name three colours."
    whole = ask(client, question).choices[0].message.content
    pieces = list(ask(client, question, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    assert len(pieces) > 3


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    question = "Where and when was the Eiffel Tower built? Answer in JSON."
    (choice,) = ask(client, question, response_format=schema, max_tokens=120).choices
    found = json.loads(choice.message.content or "")
    assert set(found) == {"city", "year"}
    assert isinstance(found["year"], int)


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "Count from one to ten in words.", stop=["four", "4"]).choices
    assert choice.finish_reason == "stop"
    assert "four" not in (choice.message.content or "")


def test_tools_in_a_request_do_not_disturb(client: openai.OpenAI) -> None:
    # The model's template says nothing of tools; the request must still be served and predicted.
    (choice,) = ask(client, "How is the weather in Oslo?", tools=[TOOL]).choices
    assert choice.message.content or choice.message.tool_calls


def test_two_sessions_share_a_document(client: openai.OpenAI, server: Server) -> None:
    first = f"{DOCUMENT}\n\nWhat does room 1 show?"
    second = f"{DOCUMENT}\n\nWhen is room 2 closed?"
    one = ask(client, first)
    other = ask(client, second)
    again = ask(client, first, one.choices[0].message.content or "", "And room 3?")
    for answer in (other, again):
        details = answer.usage and answer.usage.prompt_tokens_details
        assert answer.choices[0].message.content
        if details is not None:
            assert (details.cached_tokens or 0) > 300
    assert scheduler_state(server)


def test_answers_are_learned_from(client: openai.OpenAI, server: Server) -> None:
    for i in range(3):
        ask(client, f"What is {i} plus {i}?")
    assert scheduler_state(server)["predictor"]["num_records"] >= 3
