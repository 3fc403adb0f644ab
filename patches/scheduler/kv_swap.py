"""How a running request leaves the device and comes back, and what that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from patches.engine_types import Batch, Req, Scheduler
from patches.scheduler.calibration import Calibration
from patches.scheduler.host_memory import pool_bytes
from patches.scheduler.kv_copy import (
    Return,
    drop,
    leave_in_tree,
    swap_in,
    swap_out,
    swapped,
    token_bytes,
)
from patches.scheduler.swap_meter import SwapMeter
from sage_sched.plan import Way
from sage_sched.steps.time import ServerFacts


class KvSwap:
    """One scheduler's.

    num_yields: by whether memory ran out (else it was to a waiting request), and way.
    """

    def __init__(
        self, scheduler: Scheduler, host_pool_gib: float, calibration: Calibration
    ) -> None:
        self._scheduler = scheduler
        self._token_bytes = token_bytes(scheduler)
        self._own_pool_bytes = pool_bytes(scheduler)
        self.resize(host_pool_gib)
        self._meter = SwapMeter(scheduler, calibration)
        self.num_yields: Counter[tuple[bool, Way]] = Counter()
        self._num_resumed = 0
        self._num_recomputed = 0
        self._num_without_device_room = 0
        self._moved_tokens = 0

    def resize(self, host_pool_gib: float) -> None:
        """Host memory takes so much from now on (0: as it was found at the start); what is in it
        stays."""
        pool_bytes = int(host_pool_gib * 2**30) or self._own_pool_bytes
        self._host_pool_tokens = pool_bytes // self._token_bytes

    def stats(self) -> dict[str, float]:
        """Counters for /server_info, and what a token's move is thought to take, one way."""
        return {
            "num_yields": self.num_yields.total(),
            "num_out_of_memory": sum(self.num_yields[True, way] for way in Way),
            "num_left_in_tree": sum(self.num_yields[short, Way.LEAVE] for short in (True, False)),
            "num_resumed": self._num_resumed,
            "host_pool_gib": self._host_pool_tokens * self._token_bytes / 2**30,
            "host_pool_tokens": self._host_pool_tokens,
            "num_recomputed": self._num_recomputed,
            "num_without_device_room": self._num_without_device_room,
            "swapped_bytes": self._moved_tokens * self._token_bytes,
            "swapped_s": self._meter.total_s,
            "swap_token_us": 1e6 * self._meter.token_s,
        }

    def host_free_tokens(self, in_host_memory: Iterable[Req]) -> int:
        """KV for which host memory has room, beside that of the swapped requests."""
        return self._host_pool_tokens - sum(req.seqlen for req in in_host_memory)

    def used_ratio(self) -> float:
        """Of host memory, what is taken."""
        free_tokens = self.host_free_tokens(swapped(self._scheduler.waiting_queue))
        return 1 - free_tokens / max(1, self._host_pool_tokens)

    def priced(self, server: ServerFacts) -> ServerFacts:
        """With what a token's move is known to take by now, the same on all ranks."""
        return replace(server, swap_token_s=self._meter.token_s)

    def leave(self, running_batch: Batch, req: Req, way: Way, *, is_out_of_memory: bool) -> bool:
        """Take it off the device; False, and it goes on running, if its copy fails."""
        if way is Way.SWAP:
            num_tokens = req.seqlen - 1
            with self._meter.timing() as move:
                gone = swap_out(self._scheduler, running_batch, req)
                move.num_tokens = num_tokens if gone else 0
            if not gone:
                return False
            self._moved_tokens += num_tokens
        else:
            leave_in_tree(self._scheduler, running_batch, req)
        req.sage.job.num_yields += 1
        req.sage.waits.begins()
        self.num_yields[is_out_of_memory, way] += 1
        return True

    def resume(self, running_batch: Batch, reqs: Sequence[Req]) -> tuple[Batch, list[Req]]:
        """Bring swapped requests back: the running batch with them in it, and those that have to
        go on waiting. Of these some are swapped as before, as there is no room for them; the
        others lost their copies, and have to be computed again."""
        with self._meter.timing() as move:
            batch, outcomes = swap_in(self._scheduler, reqs)
            back = batch.reqs if batch is not None else []
            move.num_tokens = sum(req.seqlen - 1 for req in back)
        self._num_recomputed += outcomes.count(Return.LOST)
        self._num_without_device_room += outcomes.count(Return.NO_ROOM)
        left = [r for r, outcome in zip(reqs, outcomes, strict=True) if outcome is not Return.BACK]
        if batch is None:
            return running_batch, left
        self._num_resumed += len(back)
        self._moved_tokens += move.num_tokens
        if running_batch.is_empty():
            return batch, left
        running_batch.merge_batch(batch)
        return running_batch, left

    def forget_copies(self) -> None:
        """The KV of old weights, or of a flushed cache, is not to come back."""
        for req in swapped(self._scheduler.waiting_queue):
            drop(self._scheduler, req)
            self._num_recomputed += 1
