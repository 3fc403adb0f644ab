"""Hidden states are read on a real server of two ranks, and its answers stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from predictor_store.probe.recording import Recording
from tests.checks.exactness import differences
from tests.engine import stage
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, post, wait_until


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


def test_other_weights_end_it(server: SageServer, model: Path) -> None:
    update = {"model_path": str(model), "flush_cache": True}
    assert post(server, "/update_weights_from_disk", update, stage.AS_ADMIN)["success"]
    before = server.stats()["probe"]
    assert "weights" in before["stopped"]
    generate(server, SHORT_PROMPT, 8)
    assert server.stats()["probe"]["num_scores"] == before["num_scores"]
