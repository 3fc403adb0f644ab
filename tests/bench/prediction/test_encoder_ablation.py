from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.prediction import encoder as encoder_module
from bench.prediction import encoder_ablation
from bench.prediction.answers import Parts, split
from bench.prediction.bins import Bins
from bench.prediction.encoder import Encoder, FineTuning, fine_tune
from predictor_store.data.warm import Observation

pytestmark = pytest.mark.slow

SETTINGS = FineTuning(num_epochs=3, num_bins=8, batch_size=16, encoder_rate=3e-4)
FORMS = {"Write a long essay about {}.": 800, "Name one fact about {}.": 20}


def answered(num: int, seed: int) -> list[Observation]:
    """Prompts, of which a form's word tells the length."""
    rng = np.random.default_rng(seed)
    forms = itertools.cycle(FORMS.items())
    return [
        Observation(form.format(f"town {seed} {i}"), int(length * rng.lognormal(0, 0.2)) + 1)
        for i, (form, length) in zip(range(num), forms, strict=False)
    ]


PARTS = Parts(answered(80, 0), answered(20, 1), answered(40, 2))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small steps with more are mostly waiting at barriers, beside other load for minutes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tuned() -> tuple[Encoder, list[float]]:
    return fine_tune(PARTS.train, PARTS.validation, SETTINGS)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_no_prompt_is_in_two_parts(repeats: list[int]) -> None:
    answers = [
        Observation(f"prompt {i}", 1 + j) for i, num in enumerate(repeats) for j in range(num)
    ]
    parts = split(answers)
    assert [answer for part in parts for answer in part] == answers
    prompts = [{answer.prompt for answer in part} for part in parts]
    assert sum(map(len, prompts)) == len(repeats)
    shares = np.array([len(part) for part in prompts]) / len(repeats)
    assert shares == pytest.approx([0.6, 0.1, 0.3], abs=1 / len(repeats))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 40))
def test_bins_keep_the_probability_they_are_given(lengths: list[int], num_bins: int) -> None:
    bins = Bins.of(np.array(lengths), num_bins)
    assert len(bins) <= num_bins
    own = bins.targets([Observation("", length) for length in lengths])
    assert own.any(0).all()
    assert (own.sum(1) == 1).all()
    probabilities = np.random.default_rng(0).dirichlet(np.ones(len(bins))) + 0.01
    probabilities /= probabilities.sum()
    found = bins.distribution(probabilities)
    assert set(found.lengths) == set(lengths)
    of_atoms = bins.targets([Observation("", int(length)) for length in found.lengths])
    assert found.weights @ of_atoms == pytest.approx(probabilities)


def test_a_cut_answer_may_have_ended_in_any_longer_bin() -> None:
    bins = Bins.of(np.arange(1, 101), 4)
    assert bins.targets([Observation("", 30, censored=True)]).tolist() == [
        [False, True, True, True]
    ]


def test_words_that_tell_the_length_are_learnt(tuned: tuple[Encoder, list[float]]) -> None:
    encoder, _ = tuned
    predicted = encoder.predict([answer.prompt for answer in PARTS.test])
    long, short = ([found.mean() for found in predicted[first::2]] for first in (0, 1))
    assert min(long) > 2 * max(short)
    seen = {answer.output_tokens for answer in PARTS.train}
    for found in predicted:
        assert found.weights.sum() == pytest.approx(1)
        assert found.lengths.size <= 64
    sparse = encoder.bins.distribution(np.full(len(encoder.bins), 1 / len(encoder.bins)))
    assert set(sparse.lengths) == seen


def test_the_best_epoch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    means: list[float] = []

    def second_is_best(encoder: Encoder, answers: Sequence[Observation]) -> float:
        means.append(mean_of(encoder))
        return 1.0 if len(means) == 2 else 2.0

    def mean_of(encoder: Encoder) -> float:
        return encoder.predict([PARTS.test[0].prompt])[0].mean()

    monkeypatch.setattr(encoder_module, "_mean_crps", second_is_best)
    settings = dataclasses.replace(SETTINGS, num_epochs=3)
    encoder, errors = fine_tune(PARTS.train[:8], PARTS.validation, settings)
    assert errors == [2.0, 1.0, 2.0]
    assert len(set(means)) == 3
    assert mean_of(encoder) == means[1]


def test_a_seed_gives_the_same_encoder() -> None:
    settings = dataclasses.replace(SETTINGS, num_epochs=1)
    errors = [
        fine_tune(PARTS.train[:8], PARTS.validation, dataclasses.replace(settings, seed=seed))[1]
        for seed in (0, 0, 1)
    ]
    assert errors[0] == errors[1]
    assert errors[0] != errors[2]


def test_the_command_holds_all_against_the_same_answers(
    tuned: tuple[Encoder, list[float]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_ablation, "fine_tune", lambda *_: tuned)
    encoder_ablation.measure("towns", PARTS, SETTINGS)
    out = capsys.readouterr().out
    rows = [line.split("|")[1:3] for line in out.splitlines() if line.startswith("| ")]
    gains = {name.strip(): float(gain) for name, gain in rows[1:]}
    assert gains["no prediction"] == 0
    assert gains["fine-tuned encoder"] > 0.5
    assert gains["neighbours (default)"] > 0.5
    assert "40 answers" in out
