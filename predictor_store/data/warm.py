"""Fills a store from prompts and lengths that were observed elsewhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from predictor_store.predict.embedder import DEFAULT_ENCODER, Embedder, dimension, fingerprint
from predictor_store.store.store import Store
from predictor_store.store.store_file import Record, StoreError
from sage_sched.config import StoreConfig

# Committed together; the embedder sorts them by length, so that short ones are not padded.
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Observation:
    """A prompt and how long its answer was, in tokens.

    input_tokens: 0 where unknown. censored: the answer was cut off at output_tokens by its cap.
    """

    prompt: str
    output_tokens: int
    input_tokens: int = 0
    censored: bool = False


def warm_store(
    path: Path,
    observations: Iterable[Observation],
    config: StoreConfig,
    encoder: str = DEFAULT_ENCODER,
) -> int:
    """Put observations, oldest first, into the store in the folder path; return its records.

    Makes the store where there is none. Killed on the way, it leaves a valid store with part of
    them. Raises StoreError, also where the disk is full.
    """
    config = dataclasses.replace(config, path=str(path))
    with Store(config, fingerprint(encoder), dimension(encoder)) as store:
        embedder = Embedder(encoder)
        total = len(observations) if isinstance(observations, list) else None
        with tqdm(total=total, desc="embedding", unit="prompt", mininterval=1) as progress:
            for chunk in _chunks(observations):
                vectors = embedder.embed([observation.prompt for observation in chunk])
                for observation, vector in zip(chunk, vectors, strict=True):
                    store.add(
                        Record(
                            vector,
                            observation.output_tokens,
                            observation.input_tokens,
                            observation.censored,
                            "warm",
                            observation.prompt,
                        )
                    )
                store.flush(now=True)
                if store.write_error is not None:
                    raise StoreError(
                        f"cannot write the store {path}: {store.write_error}. It holds what was "
                        "written before"
                    )
                progress.update(len(chunk))
        return store.num_records


def _chunks(observations: Iterable[Observation]) -> Iterator[list[Observation]]:
    iterator = iter(observations)
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        yield chunk
