"""Guesses from a prompt's words how urgent it is, by a model learned from labelled prompts."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sage_sched.errors import UserError
from sage_sched.fields import MALFORMED

FORMAT = "sage-sched urgency 1"
# The shipped model, learned from triage notes (docs/policies.md), as float16.
BUILTIN = Path(__file__).with_name("builtin.safetensors")
NUM_LEVELS = 5
# The level at which a prompt without a level is served.
MIDDLE = 3
# With this cost, the model of the first trial found four fifths of levels 1 and 2 in its triage
# data, and flagged a third of all prompts.
UNDER_COST = 8.0
_NUM_CLASSES = NUM_LEVELS + 1
_NUM_WORDS = 1 << 15
_RIDGE = 1.0
_MAX_CHARS = 4_000
_WORD = re.compile(rb"[a-z]+|[0-9]+")

Floats = NDArray[np.float64]


class UrgencyFileError(UserError, ValueError):
    """The file is no urgency model. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class UrgencyHead:
    """A linear model of hashed words and pairs of words.

    weights: float32, shape (words, classes): levels 1 to 5, and none.
    biases: shape (classes,).
    temperature: divides the sums before they become probabilities.
    under_cost: the loss of a guess that is one level less urgent than the truth. A guess that is
        one level more urgent costs 1.
    confusion: the numbers of held-out prompts, with a row for each true level (1 to 5, and none)
        and a column for each guessed level (1 to 5); () if they were not counted.
    """

    weights: NDArray[np.float32]
    biases: Floats
    temperature: float
    under_cost: float
    confusion: tuple[tuple[int, ...], ...] = ()

    def probabilities(self, text: str) -> Floats:
        """Return the probabilities of levels 1 to 5 and of none, shape (6,)."""
        words = hashed(text)
        scale = 1.0 / math.sqrt(max(1, words.size))
        return _softmax(self.weights[words].sum(axis=0) * scale + self.biases, self.temperature)

    def level(self, text: str) -> int:
        """Return the level of a prompt with the least expected loss."""
        return int(levels_of(self.probabilities(text)[None], self.under_cost)[0])

    def write(self, path: Path) -> None:
        from safetensors.numpy import save_file

        about = {
            "format": FORMAT,
            "temperature": self.temperature,
            "under_cost": self.under_cost,
            "biases": self.biases.tolist(),
            "confusion": self.confusion,
        }
        save_file({"weights": self.weights}, path, metadata={"sage_sched": json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> UrgencyHead:
        """Read a model. Raises UrgencyFileError, OSError."""
        from safetensors import SafetensorError, safe_open

        path.stat()
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["sage_sched"])
                weights = file.get_tensor("weights").astype(np.float32)
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']!r:.60}, allowed: {FORMAT!r}")
            head = cls(
                weights,
                np.array(about["biases"], np.float64),
                float(about["temperature"]),
                float(about["under_cost"]),
                tuple(tuple(map(int, row)) for row in about.get("confusion", ())),
            )
            head._check()
        except (SafetensorError, *MALFORMED) as error:
            raise UrgencyFileError(f"the urgency model {path} cannot be used: {error}") from error
        return head

    def _check(self) -> None:
        shapes = (self.weights.shape, self.biases.shape)
        if shapes != ((_NUM_WORDS, _NUM_CLASSES), (_NUM_CLASSES,)):
            raise ValueError(f"its shapes are {shapes}")
        if not (np.isfinite(self.weights).all() and np.isfinite(self.biases).all()):
            raise ValueError("its weights are not finite")
        if not 0 < self.temperature < math.inf or not 0 < self.under_cost < math.inf:
            raise ValueError("temperature and under_cost must be above 0")


def hashed(text: str) -> NDArray[np.int64]:
    """Return the hashes of a text's words and of pairs of neighbouring words, each once, sorted."""
    words = _WORD.findall(text[:_MAX_CHARS].lower().encode("ascii", "replace"))
    sums = [zlib.crc32(word) for word in words]
    # The checksum of "one two" continues the checksum of "one".
    sums += [zlib.crc32(b" " + two, one) for one, two in zip(sums, words[1:], strict=False)]
    return np.unique(np.array(sums, np.int64) % _NUM_WORDS)


def levels_of(probabilities: Floats, under_cost: float) -> NDArray[np.int64]:
    """Return the level of least expected loss for each row of probabilities, shape (rows, 6)."""
    true = np.array([*range(1, NUM_LEVELS + 1), MIDDLE])
    said = np.arange(1, NUM_LEVELS + 1)
    off = said[None, :] - true[:, None]
    loss = np.where(off > 0, under_cost * off, -off)
    best: NDArray[np.int64] = (probabilities @ loss).argmin(axis=1) + 1
    return best


def fit(
    texts: Sequence[str], levels: Sequence[int | None], under_cost: float, seed: int = 0
) -> tuple[UrgencyHead, NDArray[np.int64]]:
    """Fit a model. Return it, and each prompt's level by a model fitted to the other four fifths.

    levels: 1 to 5; None for prompts without a level. Raises UserError if there are too few.
    """
    classes = np.array([_NUM_CLASSES - 1 if level is None else level - 1 for level in levels])
    if len(texts) < 50 or np.unique(classes).size < 2:
        raise UserError(f"{len(texts)} prompts of {np.unique(classes).size} levels are too few")
    words = _word_matrix(texts)
    fold = np.random.default_rng(seed).permutation(len(texts)) % 5
    held_out = np.empty((len(texts), _NUM_CLASSES))
    for number in range(5):
        train, test = fold != number, fold == number
        weights, biases = _ridge(words[train], classes[train])
        held_out[test] = words[test] @ weights + biases
    temperature = _calibrated(held_out, classes)
    guessed = levels_of(_softmax(held_out, temperature), under_cost)
    confusion = tuple(
        tuple(np.bincount(guessed[classes == number], minlength=NUM_LEVELS + 1)[1:].tolist())
        for number in range(_NUM_CLASSES)
    )
    weights, biases = _ridge(words, classes)
    head = UrgencyHead(weights.astype(np.float32), biases, temperature, under_cost, confusion)
    return head, guessed


def _word_matrix(texts: Sequence[str]) -> Any:
    """Return a sparse row of unit length for each text, of its hashed words."""
    from scipy.sparse import csr_array

    rows = [hashed(text) for text in texts]
    sizes = np.array([row.size for row in rows])
    values = np.repeat(1 / np.sqrt(np.maximum(1, sizes)), sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return csr_array((values, np.concatenate(rows), starts), shape=(len(rows), _NUM_WORDS))


def _ridge(words: Any, classes: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return weights, shape (words, classes), and biases of a ridge regression on class indicators.
    It is solved in its dual form, because there are fewer prompts than words."""
    wanted = np.eye(_NUM_CLASSES)[classes]
    biases: Floats = wanted.mean(axis=0)
    kernel = (words @ words.T).toarray() + _RIDGE * np.eye(words.shape[0])
    return words.T @ np.linalg.solve(kernel, wanted - biases), biases


def _calibrated(sums: Floats, classes: NDArray[np.int64]) -> float:
    """Return the temperature at which the true classes are likeliest."""
    choices = np.geomspace(0.01, 10, 60)
    rows = np.arange(len(classes))
    likely = [np.log(_softmax(sums, t)[rows, classes] + 1e-12).mean() for t in choices]
    return float(choices[int(np.argmax(likely))])


def _softmax(sums: Floats, temperature: float) -> Floats:
    scaled = sums / temperature
    scaled = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    shares: Floats = scaled / scaled.sum(axis=-1, keepdims=True)
    return shares
