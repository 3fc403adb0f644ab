"""A guess at how urgent a prompt is: learned, written, read, and never in the way."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from predictor_store.probe.file import ProbeFile, ProbeFileError
from predictor_store.urgency.head import (
    FORMAT,
    MIDDLE,
    UrgencyFileError,
    UrgencyHead,
    fit,
    hashed,
    levels_of,
)
from sage_sched.cli import main

SIGNS = {1: "not breathing", 2: "chest pain", 3: "fever", 4: "sore ankle", 5: "prescription"}


def labelled(number: int = 300) -> list[tuple[str, int | None]]:
    script = random.Random(0)
    filler = [f"word{i}" for i in range(40)]
    rows: list[tuple[str, int | None]] = []
    for _ in range(number):
        words = " ".join(script.choices(filler, k=12))
        level = script.choice((1, 2, 3, 4, 5, None))
        sign = "poem about" if level is None else SIGNS[level]
        rows.append((f"{words} {sign} {words}", level))
    return rows


@pytest.fixture(scope="module")
def head() -> UrgencyHead:
    texts, levels = zip(*labelled(), strict=True)
    return fit(texts, levels, under_cost=4.0)[0]


def test_levels_are_learned_and_other_prompts_are_in_the_middle(head: UrgencyHead) -> None:
    for level, sign in SIGNS.items():
        assert head.level(f"I have a case of {sign} here") == level
    assert head.level("Write a poem about the sea") == MIDDLE


def test_the_model_says_what_came_of_those_that_were_held_out() -> None:
    texts, levels = zip(*labelled(), strict=True)
    head, guessed = fit(texts, levels, under_cost=4.0)
    for level, counts in zip((1, 2, 3, 4, 5, None), head.confusion, strict=True):
        of_level = [
            said for said, true in zip(guessed.tolist(), levels, strict=True) if true == level
        ]
        assert [of_level.count(said) for said in range(1, 6)] == [*counts]


def test_levels_are_held_out_when_they_are_judged() -> None:
    texts = [f"nothing in common {i} {chr(97 + i % 26)}" for i in range(200)]
    levels = [1 + i % 5 for i in range(200)]
    random.Random(1).shuffle(levels)
    guessed = fit(texts, levels, under_cost=1.0)[1]
    assert np.mean(guessed == np.array(levels)) < 0.5


@given(st.lists(st.floats(0.01, 1), min_size=6, max_size=6), st.floats(1, 20))
def test_the_level_is_that_of_least_expected_loss(shares: list[float], under_cost: float) -> None:
    true = [1, 2, 3, 4, 5, MIDDLE]

    def loss(said: int) -> float:
        return sum(
            share * (under_cost * (said - level) if said > level else level - said)
            for share, level in zip(shares, true, strict=True)
        )

    best = int(levels_of(np.array([shares]), under_cost)[0])
    assert loss(best) == pytest.approx(min(map(loss, range(1, 6))))


def test_to_miss_the_urgent_costs_more_the_more_it_is_said_to() -> None:
    unsure = np.array([[0.05, 0.15, 0.3, 0.3, 0.1, 0.1]])
    levels = [int(levels_of(unsure, cost)[0]) for cost in (0.5, 2.0, 8.0, 32.0)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] >= 3 > levels[-1]


@given(st.text(max_size=200))
@example("\N{OSMANYA DIGIT ZERO} \N{KELVIN SIGN}")
def test_any_text_has_a_level(text: str) -> None:
    weights = np.zeros((1 << 15, 6), np.float32)
    assert 1 <= UrgencyHead(weights, np.zeros(6), 1.0, 4.0).level(text) <= 5
    assert hashed(text).size == np.unique(hashed(text)).size


def test_it_is_read_as_it_was_written(head: UrgencyHead, tmp_path: Path) -> None:
    head.write(tmp_path / "urgency")
    again = UrgencyHead.read(tmp_path / "urgency")
    text = "word1 chest pain"
    assert again.probabilities(text) == pytest.approx(head.probabilities(text))
    assert again.under_cost == 4.0
    assert again.confusion == head.confusion


def test_a_file_that_is_none_is_refused(head: UrgencyHead, tmp_path: Path) -> None:
    file = tmp_path / "urgency"
    file.write_bytes(b"no model")
    with pytest.raises(UrgencyFileError, match="cannot be used"):
        UrgencyHead.read(file)
    UrgencyHead(head.weights[:100], head.biases, 1.0, 4.0).write(file)
    with pytest.raises(UrgencyFileError, match="shapes"):
        UrgencyHead.read(file)
    UrgencyHead(head.weights * np.float32("nan"), head.biases, 1.0, 4.0).write(file)
    with pytest.raises(UrgencyFileError, match="not finite"):
        UrgencyHead.read(file)
    with pytest.raises(OSError, match="No such file"):
        UrgencyHead.read(tmp_path / "other")


GOOD = f'"format": "{FORMAT}", "under_cost": 8, "biases": [0, 0, 0, 0, 0, 0]'


@pytest.mark.parametrize(
    "about",
    [
        "[1]", "{", "[" * 100_000, '"x"', "null",
        f'{{{GOOD}, "temperature": 1, "confusion": [[Infinity]]}}',
        f'{{{GOOD}, "temperature": 1, "confusion": 5}}', f'{{{GOOD}, "temperature": null}}',
        f'{{{GOOD}, "temperature": 1{"0" * 400}}}', f'{{{GOOD}, "temperature": NaN}}',
    ],
)  # fmt: skip
def test_damaged_files_of_models_are_refused(about: str, tmp_path: Path) -> None:
    file, weights = tmp_path / "model", np.zeros((1 << 15, 6), np.float32)
    save_file({"weights": weights}, file, metadata={"sage_sched": about})
    with pytest.raises(UrgencyFileError, match="cannot be used"):
        UrgencyHead.read(file)
    with pytest.raises(ProbeFileError, match="cannot be used"):
        ProbeFile.read(file)


def test_the_command_trains_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tmp_path / "labels.jsonl"
    rows = [{"prompt": prompt, "urgency": level} for prompt, level in labelled()]
    labels.write_text("\n".join(map(json.dumps, rows)))
    assert main(["urgency", "train", str(labels), "--out", str(tmp_path / "urgency")]) == 0
    said = capsys.readouterr().out
    assert "Levels 1 and 2: 1.00 of them found" in said
    assert UrgencyHead.read(tmp_path / "urgency").under_cost == 8.0
    assert "Of prompts of no level" in said
    labels.write_text("\n".join(json.dumps(row) for row in rows if row["urgency"]))
    assert main(["urgency", "train", str(labels), "--out", str(tmp_path / "urgency")]) == 0
    assert "No row is of no level" in capsys.readouterr().out
    labels.write_text(json.dumps({"prompt": "x", "urgency": 6}))
    assert main(["urgency", "train", str(labels), "--out", str(tmp_path / "urgency")]) == 2
    assert "labels.jsonl:1" in capsys.readouterr().err
