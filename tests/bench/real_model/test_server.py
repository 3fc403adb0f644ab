"""The real model behind a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engines.server.server import Server
from bench.real_model.fetch import FetchError
from bench.real_model.server import chat, serve

pytestmark = [pytest.mark.long, pytest.mark.server]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        made = serve("sage", tmp_path_factory.mktemp("real_model"))
    except FetchError as error:
        pytest.skip(f"the real model cannot be had: {error}")
    with made:
        yield made


def test_it_knows_the_capital_of_france(server: Server) -> None:
    question = "What is the capital of France? Answer in one sentence."
    answer = chat(server.url, question, temperature=0, max_tokens=60)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
