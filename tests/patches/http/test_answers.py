from __future__ import annotations

from typing import Any

import pytest

from tests.patches.http.conftest import EOS, Client, Manager, generate


def test_the_history_hears_of_each_doubling(manager: Manager, client: Client) -> None:
    manager.receive(generate(rid="a"))
    for num_tokens in range(1, 301):
        manager.answer("a", num_tokens, None)
    manager.answer("a", 300, {"type": "stop"})
    told = [(what, num_tokens) for what, _, _, num_tokens, *_ in client.heard]
    assert told == [("goes on", 64), ("goes on", 128), ("goes on", 256), ("finished", 300)]


@pytest.mark.parametrize(
    ("reason", "is_cut", "stopped"),
    [
        ({"type": "stop"}, False, False),
        ({"type": "stop", "matched": EOS}, False, False),
        ({"type": "stop", "matched": 7}, False, True),
        ({"type": "stop", "matched": "END"}, False, True),
        ({"type": "length", "length": 9}, True, False),
        ({"type": "abort", "message": "gone"}, True, False),
    ],
)
def test_the_history_hears_what_ended_an_answer(
    manager: Manager, client: Client, reason: dict[str, Any], is_cut: bool, stopped: bool
) -> None:
    manager.receive(generate(sampling={"stop_token_ids": [EOS, 7]}, rid="a"))
    manager.answer("a", 9, reason)
    assert client.heard == [("finished", 1, 5, 9, is_cut, stopped)]


def test_the_history_hears_nothing_of_other_answers(manager: Manager, client: Client) -> None:
    manager.receive(generate(None, input_ids=[5], rid="health"), route="health_generate")
    manager.receive(generate(rid="fills the cache"))
    for rid, num_tokens in (("unknown", 9), ("health", 9), ("fills the cache", 0)):
        manager.answer(rid, num_tokens, {"type": "length"})
    assert client.heard == []
