"""The platform's class, in a file of its own because importing it imports SGLang."""

from __future__ import annotations

from typing import Any

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
        """Of the ways to copy KV of the hierarchical cache, the one that host_tier replaces."""
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "layer_first"

    def init_backend(self) -> None:
        from patches.platform import host_tier

        host_tier.install()
