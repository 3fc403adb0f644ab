"""Decides how much host memory the KV of swapped-out requests may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

# The share that swapped-out KV may take of the memory that is free at the start. The rest is for
# reloaded models, the page cache and other programs.
SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the free memory of this host, or of the container (control groups, version 2). Cached
    files count as free, because the kernel drops them: a model's weights have just been read."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            current = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            # Cached files, which the kernel can drop.
            cached = int(stat["inactive_file"]) + int(stat["active_file"])
            free = min(free, int(limit) - current + cached)
    except (OSError, ValueError, KeyError):
        pass  # the container has no memory limit
    return max(0, free)


def pool_bytes(server_args: Any) -> int:
    """Return the host memory for one scheduler if nothing is configured: an equal share for each
    rank of this host. Tensor-parallel ranks have to agree on the minimum of theirs."""
    args = server_args
    num_ranks = args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    num_here: int = max(1, num_ranks // args.nnodes)
    return int(SHARE * free_bytes()) // num_here
