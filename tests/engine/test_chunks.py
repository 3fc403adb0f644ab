"""A long prompt in chunks on a real server, and who comes meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.engine import stage
from tests.engine.kinds import CHUNK_TOKENS, settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate


@pytest.fixture
def server(classes: SageServer) -> SageServer:
    settings(classes, {"schedule_policy": "sage"})
    return classes


def test_a_short_prompt_overtakes_a_long_one_between_chunks(server: SageServer) -> None:
    long_prompt = " ".join(f"paragraph {i} of a long document" for i in range(60))
    alone = [generate(server, prompt, 4)["text"] for prompt in (long_prompt, SHORT_PROMPT)]
    requests_before = server.stats()
    ask = partial(generate, server, max_new_tokens=4)
    # Another beginning, so that the radix tree has nothing of it.
    with ThreadPoolExecutor(3) as pool:
        with stage.held(server, prefilled=2 * CHUNK_TOKENS):
            long = pool.submit(ask, "Anew: " + long_prompt, rid="long")
            stage.once_held(server)
            too_long = pool.submit(ask, SHORT_PROMPT * 30, rid="too long")
            stage.once_arrived(server, 2)
            short = pool.submit(ask, SHORT_PROMPT, rid="short")
            stage.once_arrived(server, 3)
        answers = [each.result() for each in (long, too_long, short)]
    assert stage.started(server) == ["short", "long", "too long"]
    assert answers[2]["text"] == alone[1]
    assert answers[0]["meta_info"]["prompt_tokens"] > 4 * CHUNK_TOKENS
    assert server.stats()["num_too_long"] > requests_before["num_too_long"]
    assert generate(server, long_prompt, 4)["text"] == alone[0]
