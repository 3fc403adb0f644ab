"""The real model behind a server under sage, asked as OpenAI's clients ask."""

from __future__ import annotations

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
