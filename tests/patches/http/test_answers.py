from __future__ import annotations

from typing import Any

from tests.patches.http.conftest import EOS, Client, Manager, generate


def test_the_history_gets_each_doubling(manager: Manager, client: Client) -> None:
    manager.receive(generate(rid="a"))
    for num_tokens in (1, 63, 65, 129, 130, 299, 300):
        manager.answer("a", num_tokens, None)
    manager.answer("a", 300, {"type": "stop"})
    told = [(what, num_tokens) for what, _, _, num_tokens, *_ in client.heard]
    assert told == [("goes on", 65), ("goes on", 130), ("goes on", 299), ("finished", 300)]


def test_the_history_gets_the_reason_for_an_answers_end(manager: Manager, client: Client) -> None:
    reasons: list[tuple[dict[str, Any], bool, bool]] = [
        ({"type": "stop"}, False, False),
        ({"type": "stop", "matched": EOS}, False, False),
        ({"type": "stop", "matched": manager.tokenizer.eos_token_id}, False, False),
        ({"type": "stop", "matched": 7}, False, True),
        ({"type": "stop", "matched": "END"}, False, True),
        ({"type": "length", "length": 9}, True, False),
        ({"type": "abort", "message": "gone"}, True, False),
    ]
    for handle, (reason, *cut_and_stopped) in enumerate(reasons, 1):
        ids = [EOS, manager.tokenizer.eos_token_id, 7]
        manager.receive(generate(sampling={"stop_token_ids": ids}, rid=f"{handle}"))
        manager.answer(f"{handle}", 9, reason)
        assert client.heard[-1] == ("finished", handle, 5, 9, *cut_and_stopped)


def test_the_history_gets_no_other_answers(manager: Manager, client: Client) -> None:
    manager.receive(generate(None, input_ids=[5], rid="health"), route="health_generate")
    manager.receive(generate(rid="fills the cache"))
    for rid, num_tokens in (("unknown", 9), ("health", 9), ("fills the cache", 0)):
        manager.answer(rid, num_tokens, {"type": "length"})
    assert client.heard == []
