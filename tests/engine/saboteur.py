"""An SGLang plugin for tests: breaks the swapping of a server, as a file orders while it runs."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from bench.engines.server import plugins

_ORDERS = "SABOTEUR_ORDERS"
# What an order may say.
NOTHING = ""
SKIP_RESTORE = "skip restore_kv_cache"
FAIL_BACKUP = "fail backup_kv_cache"
FAIL_BACKUP_ON_ONE_RANK = "fail backup_kv_cache on rank 1"
FAIL_RESTORE = "fail restore_kv_cache"
NO_ROOM = "no room on the device"
# One in this number of the calls of an order fails.
ONE_IN = 3


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    return plugins.install(folder, __name__) | {_ORDERS: str(orders_file(folder))}


def orders_file(folder: Path) -> Path:
    """Return the file of the server's orders."""
    return folder / "orders"


def register() -> None:
    """The entry point. In the scheduler it stands between kv_copy.py and SGLang's functions, and
    counts the copies that are alive (`copies_alive` among the counters of preemption)."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from patches.scheduler import kv_copy
    from patches.scheduler.preemption import Preemption

    copies: list[Any] = []

    def between(name: str) -> None:
        original: Callable[..., Any] = getattr(kv_copy, name)
        num_calls = 0

        def ordered(req: Any, *args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            order = _order()
            fails = order == f"fail {name}" or order == f"fail {name} on rank {_rank()}"
            if fails and num_calls % ONE_IN == 0:
                raise RuntimeError("on purpose")
            if order == f"skip {name}":
                req.kv.retraction_backup = None
                return None
            result = original(req, *args)
            if name == "backup_kv_cache":
                copies.append(weakref.ref(req.kv.retraction_backup.cpu_tensors[0][0][0]))
            return result

        setattr(kv_copy, name, ordered)

    between("backup_kv_cache")
    between("restore_kv_cache")
    given_room, num_asked = kv_copy._given_room, count(1)

    def room(*args: Any) -> bool:
        denied = _order() == NO_ROOM and next(num_asked) % ONE_IN == 0
        return not denied and given_room(*args)

    kv_copy._given_room = room
    stats = Preemption.stats

    def with_copies(self: Any) -> dict[str, float]:
        return stats(self) | {"copies_alive": sum(copy() is not None for copy in copies)}

    Preemption.stats = with_copies  # type: ignore[method-assign]


def _order() -> str:
    orders = Path(os.environ[_ORDERS])
    return orders.read_text() if orders.exists() else NOTHING


def _rank() -> int:
    import torch

    return torch.distributed.get_rank()
