"""Sessions on a real server: the KV of those that will soon be back is evicted last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from tests.engine.kinds import CHECKED, PATIENT
from tests.engine.serving import SageServer, warmed_store

_TRUSTING = '[hints]\ntrust = "body"\n'
# Of two prompts and what runs beside them; the pool has room for two and a half.
_PROMPT_TOKENS, _POOL_TOKENS = 250, 640
# After which pauses are foreseen (sage_sched.returns).
_NUM_PAUSES = 64


def ask(server: SageServer, ids: list[int], session: str = "") -> dict[str, Any]:
    claims = {"custom_params": {"session": session}} if session else {}
    sampling = {"temperature": 0, "max_new_tokens": 2, **claims}
    body = {"input_ids": ids, "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["meta_info"]
    return found


def test_the_kv_of_a_session_that_will_soon_be_back_outlives_that_of_others(
    model: Path, tmp_path: Path
) -> None:
    env = CHECKED | {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with SageServer(
        model, tmp_path, warmed_store(tmp_path / "store"),
        flags=["--max-total-tokens", f"{_POOL_TOKENS}"], env=env,
        settings=PATIENT + _TRUSTING,
    ) as server:  # fmt: skip
        for _ in range(_NUM_PAUSES + 1):
            ask(server, [7, 8, 9], "agent")
        kept, *others = ([100 * i + j for j in range(_PROMPT_TOKENS)] for i in range(1, 5))
        assert ask(server, kept, "agent")["cached_tokens"] == 0
        for ids in others:
            ask(server, ids)
        # What was used longest ago, but by a session.
        assert ask(server, kept, "agent")["cached_tokens"] >= _PROMPT_TOKENS - 1
        assert ask(server, others[0])["cached_tokens"] == 0
        assert server.stats()["num_policy_errors"] == 0
