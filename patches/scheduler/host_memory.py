"""How much host memory there is for the KV of requests that have left the device."""

from __future__ import annotations

from pathlib import Path

import psutil

from patches.engine_types import Scheduler
from patches.scheduler.ranks import least

# Of what is free at the start. The rest is for models that are loaded anew, page cache, and others.
SHARE = 0.25
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Of this host, or of the container's share of it (control groups, version 2). Files that are
    cached count as free, as the kernel gives them up: a model's weights have just been read."""
    free: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            current = int((cgroup / "memory.current").read_text())
            free = min(free, int(limit) - current + _cached_bytes(cgroup))
    except (OSError, ValueError, KeyError):
        pass  # there is no such bound
    return max(0, free)


def _cached_bytes(cgroup: Path) -> int:
    """Of files, with no writer or reader that would keep them in memory."""
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(stat["inactive_file"]) + int(stat["active_file"])


def pool_bytes(scheduler: Scheduler) -> int:
    """Of one scheduler, where nothing is configured: an equal part for each rank on its host, the
    same on all tensor-parallel ranks, which have to decide alike."""
    args = scheduler.server_args
    num_ranks = args.tp_size * args.pp_size * (1 if args.enable_dp_attention else args.dp_size)
    own: int = int(SHARE * free_bytes()) // max(1, num_ranks // args.nnodes)
    return least(scheduler, own)
