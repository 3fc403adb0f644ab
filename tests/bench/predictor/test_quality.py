from __future__ import annotations

import json
from dataclasses import astuple, replace
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


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 500))
def test_crps_is_mean_distance_less_half_the_mean_spread(lengths: list[int], length: int) -> None:
    values = np.array(lengths, float)
    expected = np.abs(values - length).mean() - np.abs(values[:, None] - values).mean() / 2
    found = LengthDistribution.from_samples(lengths, "warm").crps(length)
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_gain_is_the_share_saved() -> None:
    ours, theirs = (
        [Outcome(str(i), 1 + i, i, crps + i % 5, i < 40) for i in range(50)] for crps in (3.0, 5.0)
    )
    found = quality(ours, theirs)
    assert astuple(found) == pytest.approx((2 / 7, 0.271739, 0.301228, 5.0, 0.8, 1.0), rel=1e-5)


KINDS = (("Write a long essay about {}.", 800), ("Name one fact about {}.", 20))


def answered(num: int) -> list[Observation]:
    rng = np.random.default_rng(3)
    return [
        Observation(form.format(f"town {i}"), int(mean * rng.lognormal(0, 0.3)) + 1)
        for i, (form, mean) in enumerate(KINDS[kind] for kind in rng.integers(2, size=num))
    ]


def test_no_predictor_sees_an_answer_before_it_is_judged(embedder: Embedder) -> None:
    cut = Observation("Name one fact about Oslo.", 5, censored=True)  # revealed, not judged
    answers = [*answered(NUM_FIRST + 10), cut]
    # All answers to one prompt are predicted before any is revealed.
    repeated = [Observation("Name one fact about Rome.", 4000 + i) for i in range(5)]
    one, another = (
        replay([*answers, *(replace(r, output_tokens=n) for r in repeated)], CANDIDATES, embedder)
        for n in (20, 4000)
    )
    for candidate in set(CANDIDATES) - {THRESHOLD}:
        assert len(one[candidate]) == 15
        assert [o.mean for o in one[candidate]] == [o.mean for o in another[candidate]], candidate
    assert [o.length for o in another[DEFAULT]][-5:] == [4000] * 5


def test_the_command_reads_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": o.prompt, "output_tokens": o.output_tokens} for o in answered(250)]
    others = [{"prompt": f"Other {i}", "output_tokens": 9, "model": "another"} for i in range(9)]
    mine = [row | {"model": "mine"} for row in rows]
    file = lines(tmp_path / "mine.jsonl", *others, *mine)
    command = ["bench", "predictor", str(file), "--filter", "model=mine"]
    assert main(command) == 0
    assert DEFAULT in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert all((row["set"], row["num_answers"]) == ("mine.jsonl", 150) for row in read)
    gains = {row["predictor"]: row["gain"] for row in read}
    assert gains == pytest.approx({BLIND: 0.0, "input length": 0.671, DEFAULT: 0.679}, abs=0.003)
    assert main(["bench", "predictor", str(lines(file, *rows[:50]))]) == 2
    assert "too few" in capsys.readouterr().err
