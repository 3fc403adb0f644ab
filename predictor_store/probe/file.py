"""The file of a probe: a small network that reads a model's hidden states, and how to read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sage_sched.probe import Reading

FORMAT = "sage-sched probe 2"
# What must be so, and what may be.
_ALLOWED = {"format": (FORMAT,), "pooling": ("last",), "recipe": ("log", "trail")}
_ARRAYS = ("w1", "b1", "w2", "b2")
# No probe has larger sizes; a file is not read to find out that it lied.
_MOST_HIDDEN, _MOST_BINS = 65_536, 256


class ProbeFileError(ValueError):
    """The file is no probe, or one of another model; the message says what was found."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeFile:
    """A network hidden -> inner -> ReLU -> bins, float32, and what belongs to it.

    w1: (inner, hidden). b1: (inner,). w2: (bins, inner). b2: (bins,). layer: whose output it reads,
    from 0; of a prompt, at its last token. fingerprint: of the model. recipe: "log" or "trail", the
    kind of bins.
    """

    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    layer: int
    fingerprint: str
    recipe: str
    reading: Reading

    @property
    def hidden_size(self) -> int:
        return int(self.w1.shape[1])

    def log_p(self, states: NDArray[np.float32]) -> NDArray[np.float64]:
        """ln P(what is left is in bin), shape (rows, bins), of states of shape (rows, hidden)."""
        inner = np.maximum(states @ self.w1.T + self.b1, 0)
        logits = (inner @ self.w2.T + self.b2).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_p: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return log_p

    def write(self, path: Path) -> None:
        """As safetensors, all but the arrays as metadata."""
        from safetensors.numpy import save_file

        about = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "recipe": self.recipe,
            "layer": self.layer,
            "hidden_size": self.hidden_size,
            "pooling": "last",
            "edges": self.reading.edges.tolist(),
            "band_ages": self.reading.band_ages.tolist(),
            "log_base": self.reading.log_base.tolist(),
            "alpha": self.reading.alpha,
            "beta": self.reading.beta.tolist(),
            "gamma": self.reading.gamma,
        }
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        save_file(arrays, path, metadata={"sage_sched": json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> ProbeFile:
        """Raises ProbeFileError, OSError."""
        from safetensors import SafetensorError, safe_open

        path.stat()
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["sage_sched"])
                arrays = {name: file.get_tensor(name) for name in _ARRAYS}
            return cls._checked(about, arrays)
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProbeFileError(f"the probe {path} cannot be used: {error!r:.300}") from error

    @classmethod
    def _checked(
        cls, about: Mapping[str, object], arrays: Mapping[str, NDArray[np.float32]]
    ) -> ProbeFile:
        for name, allowed in _ALLOWED.items():
            if about[name] not in allowed:
                raise ValueError(f"its {name} is {about[name]!r:.60}, allowed: {allowed}")
        hidden, inner = int(str(about["hidden_size"])), arrays["w1"].shape[0]
        edges = np.asarray(about["edges"], np.int64)
        bins = edges.size - 1
        if not (
            0 < hidden <= _MOST_HIDDEN and 0 < inner <= _MOST_HIDDEN and 1 < bins <= _MOST_BINS
        ):
            raise ValueError(f"it is of {hidden} inputs, {inner} inner units and {bins} bins")
        shapes = {"w1": (inner, hidden), "b1": (inner,), "w2": (bins, inner), "b2": (bins,)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape or arrays[name].dtype != np.float32:
                found = f"{arrays[name].dtype}{arrays[name].shape}"
                raise ValueError(f"{name} is {found}, allowed: float32{shape}")
            if not np.all(np.isfinite(arrays[name])):
                raise ValueError(f"{name} is not finite")
        reading = Reading(
            edges,
            np.asarray(about["band_ages"], np.int64),
            np.asarray(about["log_base"], np.float64),
            float(str(about["alpha"])),
            np.asarray(about["beta"], np.float64),
            float(str(about["gamma"])),
        )
        layer, fingerprint, recipe = int(str(about["layer"])), about["fingerprint"], about["recipe"]
        return cls(
            **arrays, layer=layer, fingerprint=str(fingerprint), recipe=str(recipe), reading=reading
        )
