"""Writes the shipped token vectors: `python -m bench.predictor.distil`.

It needs all-MiniLM-L6-v2 from the package that `sage-sched[minilm]` installs and a minute of a
core, but no network. predictor_store/predict/token_vectors.md describes the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from predictor_store.predict import static_encoder
from predictor_store.predict.minilm import sentence_transformer

# All constants are the best or next to the best on each of seven datasets (docs/predictor.md).
_WHITENING = 0.25
_RANK_POWER = 1.5
_BATCH_SIZE = 512
_MOST = 127  # the largest int8


def distilled(alone: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return token vectors from the model's vectors of each token alone.

    Vectors are centred and turned to their principal axes. Strong axes are weakened (the model's
    vectors crowd along a few), and frequent words weigh less. Each axis points to where the third
    moment is positive. So every host derives the same vectors from the same model, except for
    rounding, and coefficients fitted on one host are good on all.

    alone: shape (vocabulary, any), in the order of the vocabulary, which is about that of word
        frequency.
    """
    centred = alone.astype(np.float64) - alone.mean(0, dtype=np.float64)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    strongest = slice(-1, -static_encoder.NUM_DIMENSIONS - 1, -1)
    turned = centred @ axes[:, strongest]
    turned *= np.sign(np.power(turned, 3).sum(0))
    # The weakest axis has almost no variance, and stays so.
    turned /= np.maximum(variances[strongest], 1e-6) ** (_WHITENING / 2)
    ranks = np.arange(1, len(turned) + 1)
    weights = np.log1p(ranks) ** _RANK_POWER
    vectors: NDArray[np.float32] = (turned * weights[:, np.newaxis]).astype(np.float32)
    return vectors


def rounded(vectors: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the vectors as whole numbers, and the scale of each row."""
    scales = np.abs(vectors).max(1) / np.float32(_MOST)
    return np.rint(vectors / scales[:, np.newaxis]).astype(np.int8), scales


def alone() -> NDArray[np.float32]:
    """Return the model's vector of each token alone."""
    import torch

    model = sentence_transformer()
    tokenizer = model.tokenizer
    found = []
    for start in range(0, len(tokenizer), _BATCH_SIZE):
        tokens = torch.arange(start, min(start + _BATCH_SIZE, len(tokenizer)))
        ends = [
            torch.full_like(tokens, i) for i in (tokenizer.cls_token_id, tokenizer.sep_token_id)
        ]
        ids = torch.stack([ends[0], tokens, ends[1]], 1)
        with torch.inference_mode():
            said = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        found.append(said["sentence_embedding"].numpy())
    return np.concatenate(found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predictor.distil", description=__doc__)
    parser.add_argument("--output", type=Path, default=static_encoder.SHIPPED_FILE)
    output = parser.parse_args(argv).output
    vectors, scales = rounded(distilled(alone()))
    np.savez(output, vectors=vectors, scales=scales)
    print(f"{static_encoder.digest(output.read_bytes())}: write it to {static_encoder.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
