"""Sessions on a real server: the KV of sessions that will soon return is evicted last."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.kinds import server_of
from tests.engine.serving import SageServer, generate, post

# The pool has room for two and a half prompts.
_PROMPT_TOKENS = 250
# After this many pauses they are predicted (sage_sched.session_returns).
_NUM_PAUSES = 64


@cache
def learn_pauses(server: SageServer) -> None:
    for _ in range(_NUM_PAUSES + 1):
        ask(server, [7, 8, 9], "agent")


@pytest.fixture
def server(foreseeing: SageServer) -> SageServer:
    """Return a server with an empty radix tree."""
    learn_pauses(foreseeing)
    post(foreseeing, "/flush_cache")
    return foreseeing


def ask(
    server: SageServer, ids: list[int], session: str = "", opened: str = "", **said: Any
) -> int:
    """Return a request's cached tokens. opened: its session of SGLang's."""
    more: dict[str, Any] = {"session_params": {"id": opened}} if opened else {}
    if session:
        more["sampling_params"] = {"custom_params": {"session": session, **said}}
    answer = generate(server, None, 2, input_ids=ids, **more)
    return int(answer["meta_info"]["cached_tokens"])


def prompt(number: int, num_tokens: int = _PROMPT_TOKENS) -> list[int]:
    """Return a prompt. The prompts of different numbers share no prefix."""
    return [100 + number, *range(200, 199 + num_tokens)]


def kept_before_others(server: SageServer, num_others: int) -> None:
    kept, *others = (prompt(number) for number in range(1 + num_others))
    assert ask(server, kept, "agent") == 0
    for ids in others:
        ask(server, ids)
    # This prompt was used longest ago, but by a session.
    assert ask(server, kept, "agent") >= _PROMPT_TOKENS - 1
    assert ask(server, others[0]) == 0
    assert server.stats()["num_policy_errors"] == 0
    post(server, "/flush_cache")


def test_sessions_outlive_other_prompts_dropped_parts_and_ended_sessions(
    server: SageServer,
) -> None:
    kept_before_others(server, 3)

    left, goes_on = (prompt(4, 100) + prompt(number, 150) for number in (5, 6))
    stranger = prompt(7, 150)
    ask(server, left, "agent")
    ask(server, goes_on, "agent")
    ask(server, stranger)
    ask(server, prompt(8, 200))
    assert ask(server, stranger) >= 149
    assert 99 <= ask(server, left) <= 101
    assert ask(server, goes_on) >= 249

    post(server, "/flush_cache")
    comes, ends = prompt(9, 200), prompt(10, 200)
    ask(server, comes, "agent", pause_ms=1000.0)
    ask(server, ends, "agent too", ends_session=True)
    ask(server, prompt(11, 300))
    assert ask(server, comes) >= 199
    assert ask(server, ends) <= 1


def test_an_open_session_of_sglang_outlives_a_closed_one(server: SageServer) -> None:
    prompts = {"is open": prompt(15, 200), "is closed": prompt(16, 200)}
    for name, ids in prompts.items():
        post(server, "/open_session", {"capacity_of_str_len": 1000, "session_id": name})
        ask(server, ids, opened=name)
    post(server, "/close_session", {"session_id": "is closed"})
    ask(server, prompt(17, 300))
    assert ask(server, prompts["is open"]) >= 199
    assert ask(server, prompts["is closed"]) <= 1


@pytest.mark.long
def test_host_memory_too_gives_up_the_session_that_comes_back_last(
    model: Path, tmp_path: Path
) -> None:
    flags = ("--enable-hierarchical-cache", "--hicache-ratio", "1.5")
    with server_of("foreseeing", model, tmp_path, *flags) as server:
        learn_pauses(server)
        kept_before_others(server, 6)
