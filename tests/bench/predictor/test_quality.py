from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.predictor.candidates import BLIND, CANDIDATES, DEFAULT, THRESHOLD
from bench.predictor.quality import Outcome, quality
from bench.predictor.replay import NUM_FIRST, replay
from predictor_store.data.warm import Observation
from predictor_store.predict.embedder import Embedder
from sage_sched.cli import main
from sage_sched.distribution import LengthDistribution
from tests.predictor_store.samples import lines

pytestmark = pytest.mark.slow

samples = st.lists(st.integers(1, 500), min_size=1, max_size=20)


def of(lengths: list[int]) -> LengthDistribution:
    return LengthDistribution.from_samples(lengths, "warm")


@given(samples, st.integers(1, 500))
def test_crps_is_mean_distance_less_half_the_mean_spread(lengths: list[int], length: int) -> None:
    values = np.array(lengths, float)
    spread = np.abs(values[:, None] - values).mean()
    expected = np.abs(values - length).mean() - spread / 2
    assert of(lengths).crps(length) == pytest.approx(expected, abs=1e-6)


def test_the_gain_is_the_share_saved() -> None:
    ours, theirs = (
        [Outcome(str(i), 1 + i, i, crps, True) for i in range(50)] for crps in (3.0, 4.0)
    )
    found = quality(ours, theirs)
    assert (found.gain, found.gain_low, found.gain_high) == pytest.approx((0.25, 0.25, 0.25))
    assert found.spearman == pytest.approx(1)


KINDS = {"Write a long essay about {}.": 800, "Name one fact about {}.": 20}


def answered(num: int) -> list[Observation]:
    rng = np.random.default_rng(3)
    kinds = list(KINDS.items())
    found = []
    for i in range(num):
        form, mean = kinds[int(rng.integers(2))]
        found.append(Observation(form.format(f"town {i}"), int(mean * rng.lognormal(0, 0.3)) + 1))
    return found


def test_no_predictor_sees_the_answer(embedder: Embedder) -> None:
    answers = answered(NUM_FIRST + 10)
    changed = [*answers[:-1], Observation(answers[-1].prompt, answers[-1].output_tokens + 999)]
    for candidate, predict in CANDIDATES.items():
        ours, theirs = (
            replay(stream, {candidate: predict}, embedder)[candidate]
            for stream in (answers, changed)
        )
        assert [o.mean for o in ours] == [o.mean for o in theirs], candidate
        assert ours[-1].length != theirs[-1].length


def test_a_prompts_other_answers_are_revealed_after_it(embedder: Embedder) -> None:
    answers = answered(NUM_FIRST)
    repeated = [Observation("Name one fact about Rome.", 4000 + i) for i in range(5)]
    found = replay([*answers, *repeated], CANDIDATES, embedder)[DEFAULT]
    assert len(found) == 5
    assert max(o.mean for o in found) < 1000


def test_prompts_that_tell_are_understood(embedder: Embedder) -> None:
    found = replay(answered(300), CANDIDATES, embedder)
    gain = quality(found[DEFAULT], found[BLIND]).gain
    assert gain > 0.5


def test_the_command_reads_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": o.prompt, "output_tokens": o.output_tokens} for o in answered(250)]
    file = lines(tmp_path / "mine.jsonl", *rows)
    assert main(["bench", "predictor", str(file)]) == 0
    assert DEFAULT in capsys.readouterr().out
    assert main(["bench", "predictor", str(file), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert {row["predictor"] for row in read} == set(CANDIDATES) - {THRESHOLD}
    assert all(row["num_answers"] == 150 for row in read)
    assert main(["bench", "predictor", str(lines(file, *rows[:50]))]) == 2
    assert "too few" in capsys.readouterr().err
