"""Reads and writes the file of a probe: a small network that reads a model's hidden states. Also
makes the fingerprint of that model."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sage_sched.errors import UserError
from sage_sched.fields import MALFORMED
from sage_sched.probe import Edges

FORMAT = "sage-sched probe 3"
# The required values of the metadata.
_ALLOWED = {"format": FORMAT, "pooling": "last"}
_ARRAYS = ("w1", "b1", "w2", "b2")
# No probe has larger sizes. A file that claims larger ones is not read further.
_MOST_HIDDEN, _MOST_BINS = 65_536, 256
_MODELS_FILES = ("config.json", "tokenizer.json")
# The number of blocks that are read from each file of weights, after its header, which names all
# tensors.
_NUM_BLOCKS = 256
_BLOCK_BYTES = 4096


class ProbeFileError(UserError, ValueError):
    """The file is no probe, or a probe of another model. The message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class ProbeFile:
    """A network hidden -> inner -> ReLU -> bins, float32, with its metadata.

    w1: (inner, hidden). b1: (inner,). w2: (bins, inner). b2: (bins,).
    layer: the layer whose output it reads, from 0; for a prompt, at its last token.
    fingerprint: the fingerprint of the model. edges: the edges of the bins.
    """

    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]
    layer: int
    fingerprint: str
    edges: Edges

    @property
    def hidden_size(self) -> int:
        return int(self.w1.shape[1])

    def log_p(self, states: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return ln P(the rest of the answer is in bin), shape (rows, bins), for states of shape
        (rows, hidden)."""
        inner = np.maximum(states @ self.w1.T + self.b1, 0)
        logits = (inner @ self.w2.T + self.b2).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_p: NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return log_p

    def write(self, path: Path) -> None:
        """Write the probe as safetensors, with everything but the arrays as metadata."""
        from safetensors.numpy import save_file

        about = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "layer": self.layer,
            "hidden_size": self.hidden_size,
            "pooling": "last",
            "edges": self.edges.tolist(),
        }
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        save_file(arrays, path, metadata={"sage_sched": json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> ProbeFile:
        """Read a probe. Raises ProbeFileError, OSError."""
        from safetensors import SafetensorError, safe_open

        path.stat()
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads((file.metadata() or {})["sage_sched"])
                arrays = {name: file.get_tensor(name) for name in _ARRAYS}
            return cls._checked(about, arrays)
        except (SafetensorError, *MALFORMED) as error:
            raise ProbeFileError(f"the probe {path} cannot be used: {error!r:.300}") from error

    @classmethod
    def _checked(
        cls, about: Mapping[str, object], arrays: Mapping[str, NDArray[np.float32]]
    ) -> ProbeFile:
        for name, allowed in _ALLOWED.items():
            if about[name] != allowed:
                raise ValueError(f"its {name} is {about[name]!r:.60}, allowed: {allowed}")
        hidden, inner = int(str(about["hidden_size"])), arrays["w1"].shape[0]
        edges = np.asarray(about["edges"], np.int64)
        bins = edges.size - 1
        if not (
            0 < hidden <= _MOST_HIDDEN and 0 < inner <= _MOST_HIDDEN and 1 < bins <= _MOST_BINS
        ):
            raise ValueError(f"it has {hidden} inputs, {inner} inner units and {bins} bins")
        shapes = {"w1": (inner, hidden), "b1": (inner,), "w2": (bins, inner), "b2": (bins,)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape or arrays[name].dtype != np.float32:
                found = f"{arrays[name].dtype}{arrays[name].shape}"
                raise ValueError(f"{name} is {found}, allowed: float32{shape}")
            if not np.all(np.isfinite(arrays[name])):
                raise ValueError(f"{name} is not finite")
        if edges[0] != 0 or np.any(np.diff(edges) <= 0):
            raise ValueError(f"edges are {edges.tolist()!r:.80}, allowed: 0, then rising")
        layer, of = int(str(about["layer"])), str(about["fingerprint"])
        return cls(**arrays, layer=layer, fingerprint=of, edges=edges)


def fingerprint(folder: Path) -> str:
    """Return a fingerprint that distinguishes models' weights without reading all of them: 16
    hexadecimal digits, from config, tokenizer and evenly sampled blocks of the weights.

    Raises OSError, and ValueError if there is no config.json, or a file of weights has no header.
    """
    digest = hashlib.sha256()
    if not (folder / _MODELS_FILES[0]).is_file():
        raise ValueError(f"{folder} is not a model's folder: it has no {_MODELS_FILES[0]}")
    for name in _MODELS_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if header_bytes > size:
                raise ValueError(f"{path} is damaged: its header is longer than the file")
            digest.update(file.read(header_bytes))
            begin = 8 + header_bytes
            for block in range(_NUM_BLOCKS):
                file.seek(begin + (size - begin) * block // _NUM_BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]
