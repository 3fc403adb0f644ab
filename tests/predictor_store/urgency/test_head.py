from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from predictor_store.probe.file import ProbeFile, ProbeFileError
from predictor_store.urgency.command import report
from predictor_store.urgency.head import (
    BUILTIN,
    FORMAT,
    MIDDLE,
    UrgencyFileError,
    UrgencyHead,
    fit,
    hashed,
    levels_of,
)
from sage_sched.cli import main
from sage_sched.errors import UserError
from tests.predictor_store.samples import lines

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


def test_levels_are_learned_and_other_prompts_are_in_the_middle() -> None:
    texts, levels = zip(*labelled(), strict=True)
    head, guessed = fit(texts, levels, under_cost=4.0)
    for level, sign in SIGNS.items():
        assert head.level(f"I have a case of {sign} here") == level
    assert head.level("Write a poem about the sea") == MIDDLE
    # So they were when they were held out.
    assert guessed.tolist() == [level or MIDDLE for level in levels]
    for true, counts in zip((1, 2, 3, 4, 5, None), head.confusion, strict=True):
        said = [levels.count(true) if level == (true or MIDDLE) else 0 for level in range(1, 6)]
        assert counts == tuple(said)
    with pytest.raises(UserError, match="too few"):
        fit(texts[:49], levels[:49], under_cost=4.0)


def test_urgent_guesses_are_reported() -> None:
    confusion = [
        (8, 1, 1, 0, 0), (2, 4, 2, 2, 0), (0, 1, 9, 0, 0), (0, 0, 1, 5, 4), (0, 0, 0, 0, 10),
        (1, 0, 19, 0, 0),
    ]  # fmt: skip
    said = report(confusion)
    assert "0.75 of them found, 0.32 of all flagged" in said
    assert "0.050 are flagged" in said


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


@given(st.text(max_size=200))
@example("\N{OSMANYA DIGIT ZERO} \N{KELVIN SIGN}")
def test_any_text_has_a_level(text: str) -> None:
    weights = np.zeros((1 << 15, 6), np.float32)
    assert 1 <= UrgencyHead(weights, np.zeros(6), 1.0, 4.0).level(text) <= 5
    assert hashed(text).size == np.unique(hashed(text)).size
    assert hashed(f"{text} CHEST Pain").tolist() == hashed(f"{text} chest pain").tolist()


def test_it_is_read_as_it_was_written_and_what_is_none_is_refused(tmp_path: Path) -> None:
    head = UrgencyHead.read(BUILTIN)
    head.write(file := tmp_path / "urgency")
    again = UrgencyHead.read(file)
    for field in ("weights", "biases", "temperature", "under_cost", "confusion"):
        np.testing.assert_array_equal(getattr(again, field), getattr(head, field))
    for weights in (head.weights[:100], head.weights * np.float32("nan")):
        UrgencyHead(weights, head.biases, 1.0, 4.0).write(file)
        with pytest.raises(UrgencyFileError, match=r"shapes|not finite"):
            UrgencyHead.read(file)
    file.write_bytes(b"no model")
    with pytest.raises(UrgencyFileError, match="cannot be used"):
        UrgencyHead.read(file)


KNOWN = [
    [0.02, 0.697, 0.011, 0.038, 0.038, 0.196],
    [0.012, 0.012, 0.01, 0.033, 0.025, 0.909],
    [0.008, 0.009, 0.015, 0.012, 0.009, 0.947],
]


def test_the_shipped_model_guesses_as_it_did() -> None:
    shipped = UrgencyHead.read(BUILTIN)
    texts = "Crushing chest pain since 20 minutes", "My ankle is sore", "poem " * 800 + "chest pain"
    found = [shipped.probabilities(text).round(3).tolist() for text in texts]
    assert found == pytest.approx(np.array(KNOWN), abs=2e-3)


GOOD = f'"format": "{FORMAT}", "under_cost": 8, "biases": [0, 0, 0, 0, 0, 0]'


@pytest.mark.parametrize(
    "about",
    [
        "[1]", "{", "[" * 100_000,
        f'{{{GOOD}, "temperature": 1, "confusion": [[Infinity]]}}',
        f'{{{GOOD}, "temperature": 1, "confusion": 5}}',
        f'{{{GOOD}, "temperature": 1{"0" * 400}}}', f'{{{GOOD}, "temperature": NaN}}',
        f'{{{GOOD}, "temperature": 0}}', f'{{{GOOD.replace("8", "0")}, "temperature": 1}}',
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
    rows = [{"prompt": prompt, "urgency": level} for prompt, level in labelled()]
    file, of_levels = tmp_path / "urgency", [row for row in rows if row["urgency"]]
    for of, code, said in (
        (rows, 0, "Levels 1 and 2: 1.00 of them found"),
        (of_levels, 0, "No row is of no level"),
        *(([{"prompt": "x", "urgency": of}], 2, "labels.jsonl:1") for of in (0, 6, True, "1")),
    ):
        labels = lines(tmp_path / "labels.jsonl", *of)
        assert main(["urgency", "train", str(labels), "--out", str(file)]) == code
        assert said in "".join(capsys.readouterr())
    assert UrgencyHead.read(file).under_cost == 8.0
