"""Runs SGLang on plain PyTorch: an out-of-tree platform for hosts without an accelerator.

SGLang's in-tree CPU path needs its CPU kernels; this platform needs only torch. It is inactive if
an accelerator is present, unless SGLANG_PLATFORM=sage_cpu asks for it.
"""

from __future__ import annotations

import os

from predictor_store.torchvision_schemas import define_missing

NAME = "sage_cpu"


def activate() -> str | None:
    """Return the platform's class, or None. Entry point of the group sglang.srt.platforms."""
    import torch

    asked_for = os.environ.get("SGLANG_PLATFORM") == NAME
    in_tree_asked_for = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    if not asked_for and (torch.accelerator.is_available() or in_tree_asked_for):
        return None
    define_missing()
    return "patches.platform.cpu:CpuPlatform"
