"""SGLang's hierarchical cache on plain PyTorch: host memory needs no pinning, and a copy is a copy.

Its `direct` backend copies layer by layer with an operator of SGLang's CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import common, mha, mla


def install() -> None:
    """Once in each scheduler, before its pools are made."""
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocated
    mha.transfer_kv_direct = mla.transfer_kv_direct = _copy


def _allocated(dims: Sequence[int], dtype: torch.dtype, device: str, **others: Any) -> torch.Tensor:
    return torch.empty(*dims, dtype=dtype, device=device)


def _copy(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Of each layer, these tokens to those places; page_size: nothing is gained by whole pages."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
