"""What a real server of two ranks learns: step times, also kept for the next, and how long answers
become."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.checks.exactness import TWO_RANKS
from tests.engine.conftest import CHECKED
from tests.engine.serving import SageServer, generate, wait_until, warmed_store

# As many as are learned from at once, and more.
NUM_ANSWERS, NUM_TOKENS = 8, 60
# As many short ones as show that forecasts are too long.
NUM_SHORT = 12


def test_what_a_server_learns_all_its_ranks_and_the_next_server_go_by(
    model: Path, tmp_path: Path
) -> None:
    store = warmed_store(tmp_path / "store")

    def server(name: str) -> SageServer:
        folder = tmp_path / name
        folder.mkdir()
        flags = ["--tp-size", "2"]
        return SageServer(model, folder, store, flags=flags, env=CHECKED | TWO_RANKS)

    with server("first") as first:
        assert first.stats()["step_time"]["source"] == "shipped"
        for i in range(NUM_ANSWERS):
            generate(first, f"Say {i}.", NUM_TOKENS, sampling_params={"ignore_eos": True})
        learned = first.stats()["step_time"]
        assert learned["source"] == "learned"
        assert learned["num_steps"] > NUM_ANSWERS * NUM_TOKENS / 2
        wait_until(lambda: all_say(first, "step times are learned now: "))
    with server("second") as second:
        kept = second.stats()["step_time"]
        assert kept["source"] == "kept"
        assert coefficients(kept) == coefficients(learned)
        wait_until(lambda: all_say(second, "step times are kept now: "))
        assert generate(second, "Say it.", 2)["meta_info"]["completion_tokens"] == 2


def all_say(server: SageServer, what: str) -> bool:
    """Whether both ranks' logs say it, and of it the same."""
    pattern = rf"(TP\d)\].* {what}(.*)"
    lines = re.findall(pattern, server.log.read_text())
    first, second = ([told for rank, told in lines if rank == name] for name in ("TP0", "TP1"))
    return len(first) > 0 and first == second


def coefficients(step_time: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step_time.items() if name.endswith("_ms")}
