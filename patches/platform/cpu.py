"""The platform's class, in a file of its own because importing it imports SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU whose attention is PyTorch's own."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Of the ways to copy KV of the hierarchical cache, the one that is replaced here."""
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"

    def init_backend(self) -> None:
        """Once in each scheduler, before its pools are made. The hierarchical cache's `direct`
        backend copies with an operator of SGLang's CUDA kernels. On plain PyTorch host memory needs
        no pinning, and a copy is a copy."""
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
    """Of each layer, these tokens to those places; page_size: nothing is gained by whole pages."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
