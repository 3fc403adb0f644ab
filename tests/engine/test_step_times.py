"""A real server of two ranks learns step times, and the next server keeps them. Its model has
latent attention, whose KV is swapped too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.engines.server import plugins
from bench.engines.server.model import write_model
from tests.checks.exactness import TWO_RANKS, ask, differences
from tests.engine import saboteur
from tests.engine.conftest import ASKED
from tests.engine.crowds import ask_together
from tests.engine.serving import CHECKED, SageServer, generate, wait_until, warmed_store

# As many as are learned from at once, and more.
NUM_ANSWERS, NUM_TOKENS = 8, 60
# More run than memory has room for to the end.
FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "16", "--tp-size", "2"]


def test_learned_step_times_are_those_of_all_ranks_and_the_next_server(tmp_path: Path) -> None:
    store = warmed_store(tmp_path / "store")
    model = write_model(tmp_path / "model", latent_attention=True)

    def server(name: str) -> SageServer:
        folder = tmp_path / name
        folder.mkdir()
        at_once = plugins.install_as(folder, "told", f"{saboteur.__name__}:tell_at_once")
        env = CHECKED | TWO_RANKS | at_once
        settings = "[preemption]\nenabled = true\n"
        return SageServer(model, folder, store, flags=FLAGS, env=env, settings=settings)

    with server("first") as first:
        assert first.stats()["step_time"]["source"] == "shipped"
        for i in range(NUM_ANSWERS):
            generate(first, f"Say {i}.", NUM_TOKENS, sampling_params={"ignore_eos": True})
        learned = first.stats()["step_time"]
        assert learned["source"] == "learned"
        assert learned["num_steps"] > NUM_ANSWERS * NUM_TOKENS / 2
        wait_until(lambda: both_ranks_say(first, "step times are learned now: "))
    with server("second") as second:
        kept = second.stats()["step_time"]
        assert kept["source"] == "kept"
        assert coefficients(kept) == coefficients(learned)
        wait_until(lambda: both_ranks_say(second, "step times are kept now: "))
        # Latent KV comes back as it went.
        asked = ASKED[:18]
        found = ask_together(second, asked)
        moved = second.preemption()
        assert moved["num_preemptions"] == moved["num_resumed"] >= 4
        assert differences(ask(second, asked, 1), found)[0] == 0


def both_ranks_say(server: SageServer, what: str) -> bool:
    """Whether both logs say it, and of it the same."""
    lines = re.findall(rf"(TP\d)\].* {what}(.*)", server.log.read_text())
    first, second = ([told for rank, told in lines if rank == name] for name in ("TP0", "TP1"))
    return len(first) > 0 and first == second


def coefficients(step_time: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step_time.items() if name.endswith("_ms")}
