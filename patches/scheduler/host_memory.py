"""How much host memory there is for the KV of requests that have left the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

# Share of what is free at the start. The rest is for reloaded models, page cache and others.
SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """What is free on this host, or in the container's share of it (control groups, version 2),
    cached files too, as the kernel gives them up: a model's weights have just been read."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            current = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            # Cached files that no reader or writer keeps in memory.
            cached = int(stat["inactive_file"]) + int(stat["active_file"])
            free = min(free, int(limit) - current + cached)
    except (OSError, ValueError, KeyError):
        pass  # there is no such limit
    return max(0, free)


def pool_bytes(server_args: Any) -> int:
    """What one scheduler may take if nothing is configured: an equal part for each rank on its
    host. Tensor-parallel ranks have to agree on the least of theirs."""
    args = server_args
    num_ranks = args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    num_here: int = max(1, num_ranks // args.nnodes)
    return int(SHARE * free_bytes()) // num_here
