"""A real server of two ranks learns step times, and the next server keeps them. Its model has
latent attention, whose KV is swapped too."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from bench.engines.server import plugins
from bench.engines.server.model import write_model
from tests.checks.exactness import TWO_RANKS, ask, differences
from tests.engine import told_at_once
from tests.engine.crowds import ask_in_waves
from tests.engine.serving import (
    CHECKED,
    LONG_PROMPT,
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
    warmed_store,
)

# As many as are learned from at once, and more.
NUM_ANSWERS, NUM_TOKENS = 8, 60
# Whenever short ones come, as many long ones yield. Cost in tokens, as a price in seconds is what
# the clock says.
SETTINGS = "[policy.sage]\nregret = inf\n[preemption]\nenabled = true\n"
FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "4", "--tp-size", "2"]


def test_learned_step_times_are_those_of_all_ranks_and_the_next_server(tmp_path: Path) -> None:
    store = warmed_store(tmp_path / "store")
    model = write_model(tmp_path / "model", latent_attention=True)

    def server(name: str) -> SageServer:
        folder = tmp_path / name
        folder.mkdir()
        env = CHECKED | TWO_RANKS | plugins.install(folder, told_at_once.__name__)
        return SageServer(model, folder, store, flags=FLAGS, env=env, settings=SETTINGS)

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
        latent_kv_comes_back_as_it_went(second)


def latent_kv_comes_back_as_it_went(server: SageServer) -> None:
    rng = random.Random(6)
    long = [(f"{LONG_PROMPT} Chapter {i}.", rng.randrange(90, 120)) for i in range(6)]
    short = [(f"{SHORT_PROMPT} Case {i}.", rng.randrange(4, 20)) for i in range(12)]
    waves = [long, short[:4], short[4:8], short[8:]]
    found = ask_in_waves(server, waves, every_tokens=20, ignore_eos=False)
    moved = server.preemption()
    assert moved["num_preemptions"] == moved["num_resumed"] >= 8
    alone = ask(server, [*long, *short], 1, sampling=[{"ignore_eos": False}])
    assert differences(alone, found)[0] == 0


def both_ranks_say(server: SageServer, what: str) -> bool:
    """Whether both logs say it, and of it the same."""
    lines = re.findall(rf"(TP\d)\].* {what}(.*)", server.log.read_text())
    first, second = ([told for rank, told in lines if rank == name] for name in ("TP0", "TP1"))
    return len(first) > 0 and first == second


def coefficients(step_time: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step_time.items() if name.endswith("_ms")}
