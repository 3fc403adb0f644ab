"""Prompts with one beginning that come together on a real server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.engine import stage
from tests.engine.conftest import CHECKED
from tests.engine.serving import SageServer, generate, warmed_store

DOCUMENT = " ".join(f"clause {i} of the contract" for i in range(80))
NUM_QUESTIONS = 4
# A prefill step is soon worth its while, on any host.
STEP_TIMES = "[step_time]\nprefill_base_ms = 1.0\nprefill_token_ms = 1.0\n"


@pytest.mark.parametrize("flags", [[], ["--disable-overlap-schedule"]], ids=["overlap", "plain"])
def test_of_those_who_ask_about_a_document_at_once_one_computes_it(
    model: Path, tmp_path: Path, flags: list[str]
) -> None:
    store = warmed_store(tmp_path / "store")
    with SageServer(
        model, tmp_path, store, flags=flags, env=CHECKED, settings=STEP_TIMES
    ) as server:
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
