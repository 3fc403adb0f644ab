"""What tensor-parallel ranks agree on, as they have to decide alike."""

from __future__ import annotations

import torch

from patches.engine_types import Scheduler


def least(scheduler: Scheduler, number: int) -> int:
    """Of all ranks' numbers; every rank has to ask."""
    group = scheduler.tp_group
    if group.world_size == 1:
        return number
    numbers = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(numbers.item())
