"""Predictions without the time that embedding takes, for servers on a device clock.

Embedding a prompt takes a CPU core 10 to 40 ms. A server with a GPU has cores to spare for that; a
host that stands for one, and runs faster than life, has not, and late predictions would be the
host's doing. So the bench embeds its prompts beforehand, and the prediction worker is one that
recalls their vectors: `python -m bench.engines.clock.recall` in the place of
`python -m predictor_store.service.worker_process`. All else of a prediction is made as ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bench.workloads.prompts import stable_hash
from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder, dimension
from predictor_store.predict.features import excerpt
from predictor_store.service import worker, worker_process

# Names the file of vectors to the worker.
VECTORS_FILE = "BENCH_VECTORS"
_CHUNK = 128

Vectors = dict[int, NDArray[np.float32]]


def remember(file: Path, prompts: Iterable[str], encoder: str = DEFAULT_ENCODER) -> None:
    """Embed those prompts that the file does not have yet; all its vectors are this encoder's."""
    known = _read(file)
    texts = {stable_hash(text): text for text in map(excerpt, prompts)}
    new = [(key, text) for key, text in texts.items() if key not in known]
    if not new:
        return
    embedder = Embedder(encoder)
    with tqdm(total=len(new), desc="embedding", unit="prompt", leave=False) as progress:
        for start in range(0, len(new), _CHUNK):
            chunk = new[start : start + _CHUNK]
            vectors = embedder.embed([text for _, text in chunk])
            known.update(zip((key for key, _ in chunk), vectors, strict=True))
            progress.update(len(chunk))
    written = file.with_suffix(".new.npz")
    np.savez(written, keys=np.array(list(known), np.uint64), vectors=np.stack(list(known.values())))
    written.replace(file)


def _read(file: Path) -> Vectors:
    if not file.exists():
        return {}
    with np.load(file) as arrays:
        return dict(zip(arrays["keys"].tolist(), arrays["vectors"], strict=True))


class RecallingEmbedder:
    """In the place of predictor_store.predict.embedder.Embedder, which embeds what is not in the
    file."""

    def __init__(self, encoder: str = DEFAULT_ENCODER, num_threads: int | None = None) -> None:
        self.encoder = encoder
        self._num_threads = num_threads
        self._file = Path(os.environ[VECTORS_FILE])
        self._known: Vectors = {}
        self._read_ns = -1
        self._read_again()
        self._embedder: Embedder | None = None

    def _read_again(self) -> None:
        """If the file has grown."""
        changed_ns = self._file.stat().st_mtime_ns if self._file.exists() else 0
        if changed_ns != self._read_ns:
            self._known, self._read_ns = _read(self._file), changed_ns

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """As Embedder's."""
        keys = [stable_hash(text) for text in texts]
        if any(key not in self._known for key in keys):
            self._read_again()
        vectors = np.empty((len(texts), dimension(self.encoder)), np.float32)
        unknown = [row for row, key in enumerate(keys) if key not in self._known]
        if unknown:
            self._embedder = self._embedder or Embedder(self.encoder, self._num_threads)
            # Not kept, as a long run may ask for new ones without end.
            vectors[unknown] = self._embedder.embed([texts[row] for row in unknown])
        for row, key in enumerate(keys):
            if row not in unknown:
                vectors[row] = self._known[key]
        return vectors


def main() -> None:
    worker.Embedder = RecallingEmbedder  # type: ignore[attr-defined,assignment]
    worker_process.main()


if __name__ == "__main__":
    main()
