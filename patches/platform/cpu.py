"""Defines the platform's class, in its own file because importing this file imports SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU with PyTorch's own attention."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose the copy backend of the hierarchical cache that init_backend replaces."""
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"

    def init_backend(self) -> None:
        """Replace the copies of the hierarchical cache's `direct` backend, once in each scheduler,
        before its pools are made.

        They use an operator of SGLang's CUDA kernels. On plain PyTorch host memory needs no
        pinning, and an assignment copies.
        """
        from sglang.srt.mem_cache.pool_host import common, mha, mla

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
    """Copy tokens of each layer to other places. page_size is unused: whole pages bring no gain
    here."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
