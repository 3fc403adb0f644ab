"""Lets a CUDA build of torchvision be imported together with a CPU build of torch.

torchvision registers shape functions for operators that its CUDA library would define. Without
these operators its import fails, and so does the import of any transformers model.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

# Only the names of the operators matter: without the library they cannot be called.
_OPERATORS = (
    "nms", "qnms", "roi_align", "qroi_align", "_roi_align_backward", "roi_pool",
    "_roi_pool_backward", "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool",
    "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


@cache  # torch unregisters a library's operators when the object is collected
def define_missing() -> object:
    """Define torchvision's operators if its own library cannot be loaded."""
    import torch

    if _own_library_loads():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor of) -> Tensor")
    return library


def _own_library_loads() -> bool:
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for path in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(path))
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")
