"""Prompts with one beginning that come together on a real server."""

from __future__ import annotations

from functools import partial

from tests.engine import stage
from tests.engine.kinds import settings
from tests.engine.serving import SageServer, generate

DOCUMENT = " ".join(f"clause {i} of the contract" for i in range(80))
NUM_QUESTIONS = 4


def one_computes_it(server: SageServer) -> None:
    settings(server, {"schedule_policy": "sage"})
    answers = stage.together(
        server,
        [
            partial(generate, server, f"All: {DOCUMENT} Question {i}?", rid=str(i))
            for i in range(NUM_QUESTIONS)
        ],
    )
    asked = sorted(answer["meta_info"]["prompt_tokens"] for answer in answers)
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in answers)
    document_tokens = asked[0] - 20
    assert cached[0] < 20
    assert all(num_tokens > document_tokens for num_tokens in cached[1:])
    # Together they were given what each is given by itself.
    again = [
        generate(server, f"All: {DOCUMENT} Question {i}?")["text"] for i in range(NUM_QUESTIONS)
    ]
    assert [answer["text"] for answer in answers] == again


def test_of_those_who_ask_about_a_document_at_once_one_computes_it(foreseeing: SageServer) -> None:
    one_computes_it(foreseeing)


def test_without_overlap_too(no_overlap: SageServer) -> None:
    one_computes_it(no_overlap)
