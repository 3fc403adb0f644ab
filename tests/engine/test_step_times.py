"""Step times on real servers: learned by one, of two ranks, and kept for the next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.checks.exactness import TWO_RANKS
from tests.engine.conftest import CHECKED
from tests.engine.serving import SageServer, generate, warmed_store

# As many as are learned from at once, and more.
NUM_ANSWERS, NUM_TOKENS = 8, 60


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
        told = told_to(first, "learned")
        # All ranks the same.
        assert set(told) == {"TP0", "TP1"}
        assert told["TP0"] == told["TP1"]
    with server("second") as second:
        kept = second.stats()["step_time"]
        assert kept["source"] == "kept"
        assert coefficients(kept) == coefficients(learned)
        assert set(told_to(second, "kept")) == {"TP0", "TP1"}
        assert generate(second, "Say it.", 2)["meta_info"]["completion_tokens"] == 2


def told_to(server: SageServer, source: str) -> dict[str, list[str]]:
    """What each rank's log says that it was told."""
    found: dict[str, list[str]] = {}
    pattern = rf"(TP\d)\].* step times are {source} now: (.*)"
    for rank, step_time in re.findall(pattern, server.log.read_text()):
        found.setdefault(rank, []).append(step_time)
    return found


def coefficients(step_time: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step_time.items() if name.endswith("_ms")}
