"""Hidden states are read on a real server, and its answers stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from predictor_store.probe.recording import Recording
from tests.checks.exactness import ask, differences
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import ask_together
from tests.engine.kinds import settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, post, wait_until


def test_answers_stay_and_scores_come(reading: SageServer, stock: Stock) -> None:
    num_different, largest = differences(stock.answers, ask_together(reading, ASKED))
    assert num_different == 0
    assert largest < 1e-3
    stats = reading.stats()
    assert stats["preemption"]["num_preemptions"] > 20
    assert stats["num_policy_errors"] == 0
    # Each token of each answer but the last, whose answer is complete by then.
    num_scores = stats["probe"]["num_scores"]
    assert num_scores > 0.8 * sum(num_tokens for _, num_tokens in ASKED)
    assert stats["probe"]["num_not_finite"] == 0
    # Scored prompts are no answers.
    answer = generate(reading, SHORT_PROMPT, 8, return_logprob=True, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) > 1
    assert num_scores < reading.stats()["probe"]["num_scores"] <= num_scores + 8


def test_recorded_states_are_those_of_the_answers(reading: SageServer) -> None:
    folder = reading.log.parent / "recorded"
    wait_until(lambda: any(folder.glob("*.answers.jsonl")))
    recording = Recording.read(folder)
    assert {num_tokens for _, num_tokens in ASKED} <= set(recording.lengths.tolist())
    assert np.all(recording.ages < recording.lengths[recording.answer])
    assert np.all(np.isfinite(recording.states))
    assert not any(path.stat().st_mode & 0o077 for path in folder.iterdir())


def test_other_weights_end_it(reading: SageServer, model: Path) -> None:
    update = {"model_path": str(model), "flush_cache": True}
    assert post(reading, "/update_weights_from_disk", update)["success"]
    before = reading.stats()["probe"]
    assert "weights" in before["stopped"]
    generate(reading, SHORT_PROMPT, 8)
    assert reading.stats()["probe"]["num_scores"] == before["num_scores"]


def test_two_ranks_go_by_the_same_scores(two_ranks: SageServer) -> None:
    """SGLang compares the ranks, and ends the server if they differ."""
    before = two_ranks.preemption()["num_preemptions"]
    trail = {"schedule_policy": "trail", "policy": {"trail": {"limit": 1000.0}}}
    settings(two_ranks, trail | {"preemption": {"enabled": True}})
    answers = ask(two_ranks, ASKED[:18], 18)
    assert [len(answer.ids) for answer in answers] == [num for _, num in ASKED[:18]]
    stats = two_ranks.stats()
    assert stats["preemption"]["num_preemptions"] - before > 10
    assert stats["probe"]["num_scores"] > 0
    assert stats["num_policy_errors"] == 0
