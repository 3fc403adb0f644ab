"""Makes a prompt's vector: an encoder's embedding, features of its wording, and features of the
request (predictor_store.predict.asked)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import asked
from predictor_store.predict.features import NUM_FEATURES, VERSION, features_of
from predictor_store.predict.minilm import MiniLM
from predictor_store.predict.static_encoder import StaticEncoder
from sage_sched.app.config import PredictorConfig

# The number of values after the encoder's part of a vector.
NUM_BESIDE = NUM_FEATURES + asked.NUM_FEATURES
DEFAULT_ENCODER = PredictorConfig().encoder
# Almost any text has more tokens in this many characters than either encoder reads. So the rest of
# a long text need not be tokenized.
MAX_CHARS = 2_000
# The encoders by their names in predictor.encoder. Each has `searched`, the columns that a search
# reads; None: all of them.
ENCODER_TYPES: dict[str, type[StaticEncoder] | type[MiniLM]] = {
    "static": StaticEncoder,
    "minilm": MiniLM,
}


def dimension(encoder: str = DEFAULT_ENCODER) -> int:
    """Return the size of a whole vector. The encoder's part comes first."""
    return ENCODER_TYPES[encoder].num_dimensions + NUM_BESIDE


def fingerprint(encoder: str = DEFAULT_ENCODER) -> str:
    """Return a name for everything that decides the vectors. Stores whose fingerprints are equal
    can share vectors."""
    return f"{ENCODER_TYPES[encoder].fingerprint()}/features {VERSION}.{asked.VERSION}"


class Embedder:
    """Embeds texts. encoder: see PredictorConfig. num_threads: None for all cores."""

    def __init__(self, encoder: str = DEFAULT_ENCODER, num_threads: int | None = None) -> None:
        self.encoder = encoder
        self._encoder = ENCODER_TYPES[encoder](num_threads)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors of any texts, float32, shape (len(texts), dimension(self.encoder)).

        A vector has the encoder's vector of unit length, predictor_store.predict.features, and
        zeros for Asked.features.
        """
        if not texts:
            return np.empty((0, dimension(self.encoder)), np.float32)
        # The tokenizer takes UTF-8, which has no lone surrogates.
        read = [text[:MAX_CHARS].encode("utf-8", "replace").decode("utf-8") for text in texts]
        encoded = self._encoder.encode(read)
        features = np.array([features_of(text) for text in texts])
        return np.hstack([encoded, features, np.zeros((len(texts), asked.NUM_FEATURES), "f4")])
