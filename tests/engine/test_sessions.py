"""Sessions on a real server: the KV of sessions that will soon return is evicted last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engine.kinds import CHECKED, PATIENT
from tests.engine.serving import SageServer, warmed_store

_TRUSTING = '[hints]\ntrust = "body"\n'
_ENV = CHECKED | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
# The pool has room for two and a half prompts.
_PROMPT_TOKENS, _POOL_TOKENS = 250, 640
# After this many pauses they are predicted (sage_sched.session_returns).
_NUM_PAUSES = 64


def ask(
    server: SageServer, ids: list[int], session: str = "", opened: str = "", **said: Any
) -> int:
    """Return how many tokens of a prompt were cached. opened: the session of SGLang that it belongs
    to."""
    claims = {"custom_params": {"session": session, **said}} if session else {}
    sampling = {"temperature": 0, "max_new_tokens": 2, **claims}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
    if opened:
        body["session_params"] = {"id": opened}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    found: int = answer.json()["meta_info"]["cached_tokens"]
    return found


def chat(server: SageServer, *texts: str) -> int:
    """The same of a chat that names no session. Its first text is its system prompt."""
    roles = ["system", *("user", "assistant") * len(texts)]
    said = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    body = {"model": "model", "max_tokens": 2, "messages": said}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    answer.raise_for_status()
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def prompt(number: int, num_tokens: int = _PROMPT_TOKENS) -> list[int]:
    """No two numbers begin alike."""
    return [100 + number, *range(200, 199 + num_tokens)]


def server_of(model: Path, folder: Path, flags: Sequence[str] = ()) -> SageServer:
    return SageServer(
        model, folder, warmed_store(folder / "store"),
        flags=["--max-total-tokens", f"{_POOL_TOKENS}", "--enable-cache-report", *flags], env=_ENV,
        settings=PATIENT + _TRUSTING,
    )  # fmt: skip


def learn_pauses(server: SageServer) -> None:
    for _ in range(_NUM_PAUSES + 1):
        ask(server, [7, 8, 9], "agent")


def kept_before_others(server: SageServer, num_others: int) -> None:
    kept, *others = (prompt(number) for number in range(1 + num_others))
    assert ask(server, kept, "agent") == 0
    for ids in others:
        ask(server, ids)
    # It was used longest ago, but by a session.
    assert ask(server, kept, "agent") >= _PROMPT_TOKENS - 1
    assert ask(server, others[0]) == 0


def test_the_kv_of_a_session_that_will_soon_be_back_outlives_that_of_others(
    model: Path, tmp_path: Path
) -> None:
    with server_of(model, tmp_path) as server:
        learn_pauses(server)
        kept_before_others(server, 3)

        # Its old answer, which its next prompt leaves out, goes before what others had later.
        left, goes_on = (prompt(4, 100) + prompt(number, 150) for number in (5, 6))
        stranger = prompt(7, 150)
        ask(server, left, "agent")
        ask(server, goes_on, "agent")
        ask(server, stranger)
        ask(server, prompt(8, 200))
        assert ask(server, stranger) >= 149
        assert 99 <= ask(server, left) <= 101
        assert ask(server, goes_on) >= 249

        # Of two that are alike the one is kept whose client says that it comes back.
        assert requests.post(f"{server.url}/flush_cache", timeout=300).ok
        comes, ends = prompt(9, 200), prompt(10, 200)
        ask(server, comes, "agent", pause_ms=1000.0)
        ask(server, ends, "agent too", ends_session=True)
        ask(server, prompt(11, 300))
        assert ask(server, comes) >= 199
        assert ask(server, ends) <= 1

        # A session that its client has closed does not return.
        assert requests.post(f"{server.url}/flush_cache", timeout=300).ok
        names = {name: {"session_id": name} for name in ("is open", "is closed")}
        for number, name in enumerate(names):
            opening = {"capacity_of_str_len": 1000, **names[name]}
            assert requests.post(f"{server.url}/open_session", json=opening, timeout=300).ok
            ask(server, prompt(15 + number, 200), opened=name)
        closing = names["is closed"]
        assert requests.post(f"{server.url}/close_session", json=closing, timeout=300).ok
        ask(server, prompt(17, 300))
        assert ask(server, prompt(15, 200)) >= 199
        assert ask(server, prompt(16, 200)) <= 1

        # So it is of a chat, which its beginning tells from others.
        assert requests.post(f"{server.url}/flush_cache", timeout=300).ok
        begun = "be kind", " ".join(["hello"] * 180)
        chat(server, *begun)
        assert chat(server, *begun, "yes", "go on") >= 180
        for number in range(12, 15):
            ask(server, prompt(number))
        assert chat(server, *begun, "yes", "go on", "yes", "and on") >= 180
        assert server.stats()["num_policy_errors"] == 0


@pytest.mark.long
def test_host_memory_too_gives_up_the_session_that_comes_back_last(
    model: Path, tmp_path: Path
) -> None:
    flags = ["--enable-hierarchical-cache", "--hicache-ratio", "1.5"]
    with server_of(model, tmp_path, flags) as server:
        learn_pauses(server)
        kept_before_others(server, 6)
        assert server.stats()["num_policy_errors"] == 0
