"""An SGLang plugin for tests: breaks the swapping of a server, as stage.sabotaged() orders."""

from __future__ import annotations

import sys
import weakref
from dataclasses import astuple
from itertools import count
from pathlib import Path
from typing import Any

from bench.engines.server import plugins
from tests.engine.hooks import around
from tests.engine.stage import Stage

# The orders. Under an order one call in ONE_IN fails. SKIP_RESTORE affects all calls.
SKIP_RESTORE, FAIL_BACKUP, FAIL_BACKUP_ON_ONE_RANK, FAIL_RESTORE, NO_ROOM = range(1, 6)
ONE_IN = 3


def install(folder: Path) -> dict[str, str]:
    """Make the plugin known to servers with this environment."""
    return plugins.install(folder, __name__)


def register() -> None:
    """The entry point. In the scheduler it wraps the arena of copies, and counts the copies that
    are alive (`copies_alive` among the counters of preemption)."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from torch import distributed

    from patches.scheduler import kv_copy
    from patches.scheduler.kv_arena import KvArena
    from patches.scheduler.preemption import Preemption

    copies: list[Any] = []
    copy_out, put_back = KvArena.copy_out, KvArena.put_back
    given_room, num_calls = kv_copy._given_room, count(1)

    def fails(*orders: int) -> bool:
        return Stage.sabotage in orders and next(num_calls) % ONE_IN == 0

    def copied(arena: Any, slots: Any) -> Any:
        is_on_this_rank = distributed.get_rank() == 1
        if fails(FAIL_BACKUP, *[FAIL_BACKUP_ON_ONE_RANK] * is_on_this_rank):
            raise RuntimeError("on purpose")
        copy = copy_out(arena, slots)
        if copy is not None:
            copies.append(weakref.ref(copy))
        return copy

    def restored(arena: Any, copy: Any, slots: Any, num_kept: int) -> None:
        if fails(FAIL_RESTORE):
            raise RuntimeError("on purpose")
        put_back(arena, copy, slots, len(slots) if Stage.sabotage == SKIP_RESTORE else num_kept)

    KvArena.copy_out, KvArena.put_back = copied, restored  # type: ignore[assignment,method-assign]
    kv_copy._given_room = lambda *args: not fails(NO_ROOM) and given_room(*args)

    def with_copies(stats: Any, self: Any) -> dict[str, float]:
        return {**stats(), "copies_alive": sum(copy() is not None for copy in copies)}

    around(Preemption, "stats", with_copies)


def tell_at_once() -> None:
    """Another entry point. Learned step times take effect even if they hardly change, and are kept
    after a few steps. Because hosts differ, each step seems to take the shipped time and a fifth
    more."""
    from patches.scheduler import calibration
    from sage_sched import step_learner
    from sage_sched.app.config import StepTimeConfig

    shipped = astuple(StepTimeConfig().step_time())

    def add(original: Any, self: Any, work: Any, seconds: float) -> None:
        original(work, 1.2 * sum(a * b for a, b in zip(work, shipped, strict=True)))

    around(step_learner.StepLearner, "add", add)

    assert step_learner._WORTH_REPORTING > 0
    assert calibration._LEAST_KEPT_STEPS > 0
    step_learner._WORTH_REPORTING, calibration._LEAST_KEPT_STEPS = 0.0, 0
