"""The paper's simulations, on made-up recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.triage.paper import main
from bench.triage.spikes import Case, Logged, predicted_s, waited, with_errors

LOGGED = Logged(np.arange(200) % 5, np.full(200, 300), np.arange(200) % 250 + 200)


def test_a_batch_is_predicted_when_all_of_it_has_come_and_the_one_before_is_done() -> None:
    came_s = np.array([0.0, 1.0, 1.0, 5.0, 5.0])
    assert predicted_s(came_s, 0.5, 2).tolist() == [1.5, 1.5, 5.5, 5.5, 6.0]
    # Each by itself: the third waits for the second.
    assert predicted_s(came_s, 0.5, 1).tolist() == [0.5, 1.5, 2.0, 5.5, 6.0]
    assert predicted_s(came_s, 0.0, 1).tolist() == came_s.tolist()


@pytest.mark.parametrize(("error", "off"), [(0.2, 1), (0.4, 2), (0.9, 4)])
def test_so_many_levels_are_wrong_by_so_much_as_is_possible(error: float, off: int) -> None:
    truth = np.arange(10_000) % 5
    said = with_errors(truth, error, np.random.default_rng(0))
    assert ((said >= 0) & (said <= 4)).all()
    wrong = said != truth
    assert wrong.mean() == pytest.approx(error, abs=0.02)
    most = np.maximum(truth, 4 - truth)
    assert (np.abs(said - truth)[wrong] == np.minimum(off, most)[wrong]).all()


def test_who_is_urgent_waits_less_by_level_and_more_by_wrong_ones() -> None:
    fcfs, semantic = (waited(LOGGED, Case(policy, most=100), 0) for policy in ("fcfs", "semantic"))
    assert semantic[0] < 0.8 * fcfs[0]
    assert semantic[0] < semantic[3]
    assert semantic[0] < waited(LOGGED, Case(most=100, level_error=0.9), 0)[0]
    assert waited(LOGGED, Case(most=100), 0).tolist() == semantic.tolist()


def test_what_the_predictor_takes_is_waited_for() -> None:
    soon, late = (waited(LOGGED, Case(latency_s=latency_s), 0) for latency_s in (0.0, 1.0))
    assert late[5] > 2 * soon[5]


def test_the_command_prints_a_figure(recordings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(recordings), "--seeds", "1", "--figures", "t2", "3"]) == 0
    said = capsys.readouterr().out
    assert "| batches of 64 |" in said
    assert "| up to 100 at once |" in said
    assert main(["--data", str(recordings / "none")]) == 2
