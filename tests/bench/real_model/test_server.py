"""The real model behind a server under sage, asked as OpenAI's clients ask."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from bench.engines.server.policy_server import scheduler_state
from bench.real_model.fetch import FetchError
from bench.real_model.server import serve
from tests.engine.serving import wait_until

pytestmark = [pytest.mark.long, pytest.mark.server]


def test_it_knows_the_capital_of_france_and_answers_are_learned_from(tmp_path: Path) -> None:
    question = "What is the capital of France? Answer in one sentence."
    try:
        server = serve("sage", tmp_path)
    except FetchError as error:
        pytest.skip(f"the real model cannot be had: {error}")
    with server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=900) as client:
        (choice,) = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": question}],
            temperature=0, max_tokens=60,
        ).choices  # fmt: skip
        assert "Paris" in (choice.message.content or "")
        assert choice.finish_reason == "stop"
        # The predictor reports its records once a second.
        wait_until(lambda: scheduler_state(server)["predictor"]["num_records"] >= 1)
