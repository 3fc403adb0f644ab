"""The shipped files: general lengths, and token vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.predictor.distil import alone, distilled, rounded
from bench.predictor.general import PromptSet, fit, held_out, write
from predictor_store.predict import regression
from predictor_store.predict.regression import GeneralLength
from predictor_store.predict.static_encoder import token_vectors
from tests.predictor_store.samples import unit_vectors

ENCODER = "static"


def made_up(name: str, level: float, slope: float = 4.0, seed: int = 0) -> PromptSet:
    """Logarithms of lengths are level + slope * (the vector's first number) + noise of 0.5."""
    vectors = unit_vectors(400, seed, 8).astype(np.float64)
    noise = np.random.default_rng(seed).normal(0, 0.5, 400)
    prompts = [f"{name} {i}" for i in range(400)]
    return PromptSet(prompts, vectors, level + slope * vectors[:, 0] + noise)


SETS = [made_up(str(i), level, seed=i) for i, level in enumerate((3.0, 5.0, 7.0))]


def test_the_effect_of_prompts_is_found_at_any_level() -> None:
    general = fit(SETS, ENCODER)
    assert general.weights[0] == pytest.approx(4, abs=0.3)
    assert abs(general.weights[1:]).max() < 0.3
    assert general.errors.std() == pytest.approx(0.5, abs=0.05)
    assert general.level == pytest.approx(5, abs=0.2)
    # The levels' variance is 4, the error's 0.25.
    assert general.level_worth == pytest.approx(0.25 / 4, rel=0.1)
    # An effect that other sets contradict is damped.
    contrary = made_up("contrary", 5.0, slope=-4.0, seed=9)
    assert abs(fit([*SETS, contrary], ENCODER).weights[0]) < 1.5


def test_a_set_that_is_held_out_has_no_say() -> None:
    spoilt = made_up("spoilt", 100.0, slope=-50.0, seed=9)
    without = held_out([*SETS, spoilt], ENCODER, set(spoilt.prompts))
    assert without is not None
    np.testing.assert_allclose(without.weights, fit(SETS, ENCODER).weights)
    every = {prompt for each in SETS for prompt in each.prompts}
    assert held_out([*SETS, spoilt], ENCODER, every) is None


def test_coefficients_survive_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert regression.SHIPPED_FILE.stat().st_size < 30_000
    monkeypatch.setattr(regression, "SHIPPED_FILE", tmp_path / "general.json")
    general = fit(SETS, ENCODER)
    for encoder in ("minilm", ENCODER):
        write(general, encoder, tmp_path / "general.json")
    for encoder in ("minilm", ENCODER):
        read = GeneralLength.shipped(encoder)
        assert read.fingerprint == general.fingerprint
        for name in ("weights", "errors", "level", "level_worth"):
            np.testing.assert_allclose(getattr(read, name), getattr(general, name), rtol=2e-3)


@pytest.mark.slow
def test_the_shipped_file_is_what_the_command_makes() -> None:
    """The last digit may differ, because hosts round differently."""
    vectors, scales = rounded(distilled(alone()))
    shipped, shipped_scales = token_vectors()
    np.testing.assert_allclose(scales, shipped_scales, rtol=1e-2)
    assert abs(vectors.astype(int) - shipped).max() <= 2
