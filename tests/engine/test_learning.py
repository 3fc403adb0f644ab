"""Real servers of two ranks read hidden states and learn step times. Their answers stay the
same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.engines.server import plugins
from bench.engines.server.model import write_model
from predictor_store.probe.recording import Recording
from tests.checks.exactness import TWO_RANKS, ask, differences
from tests.engine import saboteur
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import (
    CHECKED,
    SHORT_PROMPT,
    SageServer,
    generate,
    wait_until,
    warmed_store,
)

# One round of learning has this many answers, and more prefills than it leaves out.
NUM_ANSWERS, NUM_TOKENS = 20, 30
# More requests run than can fit to their end.
FLAGS = ["--max-total-tokens", "640", "--max-running-requests", "16", "--tp-size", "2"]


@pytest.fixture
def server(two_ranks: SageServer) -> SageServer:
    settings(two_ranks, {"schedule_policy": "trail", "preemption": {"enabled": True}})
    return two_ranks


def test_answers_stay_and_scores_come(server: SageServer, stock: Stock) -> None:
    """SGLang compares the ranks, and ends the server if they differ."""
    before = server.stats()
    num_different, largest = differences(stock, ask_together(server, ASKED))
    assert num_different == 0
    assert largest < 1e-3
    stats = server.stats()
    moved = stats["preemption"]["num_preemptions"] - before["preemption"]["num_preemptions"]
    assert moved > 20
    assert stats["num_policy_errors"] == 0
    # Each token of each answer but the last, whose answer is complete by then.
    num_scores = stats["probe"]["num_scores"]
    assert num_scores > 0.8 * sum(num_tokens for _, num_tokens in ASKED)
    assert stats["probe"]["num_not_finite"] == 0
    # Scored prompts are no answers.
    answer = generate(server, SHORT_PROMPT, 8, return_logprob=True, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) > 1
    assert num_scores < server.stats()["probe"]["num_scores"] <= num_scores + 8


def test_recorded_states_are_those_of_the_answers(server: SageServer) -> None:
    folder = server.log.parent / "recorded"
    wait_until(lambda: any(folder.glob("*.answers.jsonl")))
    recording = Recording.read(folder)
    assert {num_tokens for _, num_tokens in ASKED} <= set(recording.lengths.tolist())
    assert np.all(recording.ages < recording.lengths[recording.answer])
    assert np.all(np.isfinite(recording.states))


def test_learned_step_times_are_those_of_all_ranks_and_the_next_server(tmp_path: Path) -> None:
    """The model has latent attention. Its KV is swapped too."""
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
        # Latent KV comes back unchanged.
        asked = ASKED[:18]
        found = ask_together(second, asked)
        moved = second.preemption()
        assert moved["num_preemptions"] == moved["num_resumed"] > 0  # how many depends on the host
        assert differences(ask(second, asked, 1), found)[0] == 0


def both_ranks_say(server: SageServer, what: str) -> bool:
    """Whether both ranks' logs have these words, with the same ends of lines."""
    lines = re.findall(rf"(TP\d)\].* {what}(.*)", server.log.read_text())
    first, second = ([told for rank, told in lines if rank == name] for name in ("TP0", "TP1"))
    return len(first) > 0 and first == second


def coefficients(step_time: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in step_time.items() if name.endswith("_ms")}
