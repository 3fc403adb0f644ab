"""Hidden states are read on a real server, and its answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from predictor_store.probe.file import fingerprint
from predictor_store.probe.recording import Recording
from tests.checks.exactness import ask, differences
from tests.engine.conftest import ASKED, Stock
from tests.engine.crowds import ask_together
from tests.engine.kinds import YIELDING_FLAGS, settings
from tests.engine.serving import SHORT_PROMPT, SageServer, generate, post, wait_until
from tests.predictor_store.probes import probe

# A request's rank changes with each token, and none is too old to yield.
SETTINGS = """
[policy.trail]
limit = 1000.0
[step_time]
decode_base_ms = 6.0
[probe]
file = "{folder}/probe"
record = "{folder}/recorded"
"""


# For the tests of one class, so that it is gone when the next one starts.
@pytest.fixture(scope="class")
def reading(
    model: Path, stock: Stock, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SageServer]:
    """Under trail, with a random probe."""
    folder = tmp_path_factory.mktemp("reading")
    probe(fingerprint(model)).write(folder / "probe")
    settings = SETTINGS.format(folder=folder)
    with SageServer(
        model, folder, flags=YIELDING_FLAGS, settings=settings, policy="trail"
    ) as server:
        yield server


class TestStatesAreRead:
    def test_answers_stay_and_scores_come(self, reading: SageServer, stock: Stock) -> None:
        num_different, largest = differences(stock.answers, ask_together(reading, ASKED))
        assert num_different == 0
        assert largest < 1e-3
        stats = reading.stats()
        assert stats["preemption"]["num_preemptions"] > 20
        assert stats["num_policy_errors"] == 0
        # Each token of each answer but the last, whose answer is complete by then.
        assert stats["probe"]["num_scores"] > 0.8 * sum(num_tokens for _, num_tokens in ASKED)
        assert stats["probe"]["num_not_finite"] == 0

    def test_scored_prompts_are_no_answers(self, reading: SageServer) -> None:
        before = reading.stats()["probe"]["num_scores"]
        answer = generate(reading, SHORT_PROMPT, 8, return_logprob=True, logprob_start_len=0)
        assert len(answer["meta_info"]["input_token_logprobs"]) > 1
        assert before < reading.stats()["probe"]["num_scores"] <= before + 8

    def test_recorded_states_are_those_of_the_answers(self, reading: SageServer) -> None:
        folder = reading.log.parent / "recorded"
        wait_until(lambda: any(folder.glob("*.answers.jsonl")))
        recording = Recording.read(folder)
        assert {num_tokens for _, num_tokens in ASKED} <= set(recording.lengths.tolist())
        assert np.all(recording.ages < recording.lengths[recording.answer])
        assert np.all(np.isfinite(recording.states))
        assert not any(path.stat().st_mode & 0o077 for path in folder.iterdir())

    def test_other_weights_end_it(self, reading: SageServer, model: Path) -> None:
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
