"""A fingerprint that tells one model's weights from another's, without reading all of them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

_NAMES = ("config.json", "tokenizer.json")
# Read of each file of weights: its header, which names all tensors, and this many blocks.
_NUM_BLOCKS = 256
_BLOCK_BYTES = 4096


def fingerprint(folder: Path) -> str:
    """16 hexadecimal digits, from config, tokenizer and evenly sampled blocks of the weights.

    Raises OSError, ValueError if there is no config.json, or a file of weights has no header.
    """
    digest = hashlib.sha256()
    if not (folder / _NAMES[0]).is_file():
        raise ValueError(f"{folder} is no folder of a model: it has no {_NAMES[0]}")
    for name in _NAMES:
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
