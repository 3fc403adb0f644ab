"""What is known of answers' lengths before any has ended here: a regression that is shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# Fitted by bench/predictor/general.py; by encoder.
SHIPPED_FILE = Path(__file__).with_name("general_length.json")
# No answer is foreseen to be longer.
_MOST_TOKENS = 2.0**20


@dataclass(frozen=True, slots=True, eq=False)
class GeneralLength:
    """The logarithm of an answer's length, as it is anywhere: a level, which differs from server
    to server, what the prompt adds to it, and an error.

    weights: float64, shape (dimension,), of a prompt's vector, for what it adds. errors: float64,
    rising, alike likely. level: where nothing has ended yet. level_worth: so many answers that
    have ended tell as much of the level. logs: float64, rising, alike likely, of the length of an
    answer to an unknown prompt on an unknown server. fingerprint: of what made the vectors.
    """

    fingerprint: str
    weights: NDArray[np.float64]
    errors: NDArray[np.float64]
    level: float
    level_worth: float
    logs: NDArray[np.float64]

    @classmethod
    def shipped(cls, encoder: str) -> Self:
        """For prompts' vectors by this encoder."""
        fields: Mapping[str, Any] = json.loads(SHIPPED_FILE.read_text("ascii"))[encoder]
        weights, errors, logs = (np.array(fields[name]) for name in ("weights", "errors", "logs"))
        level, worth = fields["level"], fields["level_worth"]
        return cls(fields["fingerprint"], weights, errors, level, worth, logs)

    @property
    def spread(self) -> float:
        """Standard deviation of the error."""
        return float(self.errors.std())

    def of(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """What prompts add to the level, shape (n,), of vectors, shape (n, dimension)."""
        added: NDArray[np.float64] = vectors @ self.weights
        return added

    def level_after(self, excess: NDArray[np.float64]) -> float:
        """The level. excess: by how much the logarithms of lengths that have ended exceed what
        their prompts add."""
        total = self.level * self.level_worth + float(excess.sum())
        return total / (self.level_worth + excess.size)

    def lengths(self, added: float, excess: NDArray[np.float64]) -> NDArray[np.int64]:
        """Tokens of an answer, alike likely. The less is known of the level, the wider."""
        level = self.level_after(excess)
        widened = np.sqrt(1 + 1 / (self.level_worth + excess.size))
        return _tokens(level + added + widened * self.errors)

    def of_any_prompt(self) -> NDArray[np.int64]:
        """Tokens of an answer to an unknown prompt, alike likely."""
        return _tokens(self.logs)


def _tokens(logs: NDArray[np.float64]) -> NDArray[np.int64]:
    tokens: NDArray[np.int64] = np.rint(np.clip(np.exp(logs), 1, _MOST_TOKENS)).astype(np.int64)
    return tokens
